"""`fledge run`: one answer as it is written, with each round of speculation visible, and what it cost.

A stream's dicts are cumulative and come one per step, so a round is what a dict has more than the one before
it. How many of its tokens were drafts says the histogram in its meta_info; the one behind them is the
target's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .engine_flags import command
from .measure import Cost, measure, step_phases
from .stages_door import (
    encode_prompts,
    merge_flags,
    refusals,
    refuse_abort,
    refuse_ranks,
    resolve_stage,
    shape_name,
)

COLOURS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red")


@dataclass(frozen=True)
class Round:
    """One step's new tokens, of which the first `accepted` were drafts; the prefill's step has one token."""

    tokens: list[int]
    accepted: int


def rounds_of(stream: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Each dict of a stream with what is new in it."""
    seen, before = 0, [0]
    for result in stream:
        tokens = result["output_ids"][seen:]
        seen += len(tokens)
        after = list(result["meta_info"].get("spec_correct_drafts_histogram", [0]))
        before += [0] * (len(after) - len(before))
        accepted = next((n for n, count in enumerate(after) if count > before[n]), 0)
        before = after
        yield result, Round(tokens, accepted)


class Painter:
    """Writes a growing text: a colour for each round, and the tokens that the target added underlined.

    A tokenizer's text for a token can be held back (half a character, the possible start of a stop string),
    so each character takes the style of the token that it belongs to and not of the round that showed it.

    Args:
        detokenizer: gets every token by `append` and says in `stream_text` how far the text has got.
        plain: write the text and no style.
    """

    def __init__(self, console: Console, detokenizer: Any, plain: bool):
        self.console, self.detokenizer, self.plain = console, detokenizer, plain
        self.ends: list[tuple[int, str]] = []  # where in the text each token ends, and its style
        self.shown = self.round = self.token = 0

    def show(self, text: str, step: Round) -> None:
        """Write what `text` has more than was written, after taking in the tokens of `step`."""
        is_prefill = not self.ends
        colour = "" if is_prefill else COLOURS[self.round % len(COLOURS)]
        self.round += not is_prefill
        for number, token in enumerate(step.tokens):
            style = colour if number < step.accepted else f"{colour} underline".strip()
            self.detokenizer.append(token)
            self.ends.append((len(self.detokenizer.stream_text()), style))
        self._write(text)

    def _write(self, text: str) -> None:
        while self.shown < len(text):
            while self.token < len(self.ends) - 1 and self.ends[self.token][0] <= self.shown:
                self.token += 1
            end, style = self.ends[self.token]
            end = len(text) if end <= self.shown else min(end, len(text))
            piece = text[self.shown : end]
            self.console.print(Text(piece, style="" if self.plain else style), end="", soft_wrap=True)
            self.shown = end


def accept_counts(histogram: list[int], depths: int) -> list[tuple[int, int]]:
    """For each draft position, how often it was accepted, and in how many rounds it could have been.

    `histogram[n]` is the number of rounds that accepted n drafts; position d could be accepted where d - 1
    was.
    """
    reached = [sum(histogram[depth:]) for depth in range(depths + 1)]
    return [(reached[depth], reached[depth - 1]) for depth in range(1, depths + 1)]


def summary(result: dict[str, Any], info: dict[str, Any], cost: Cost) -> list[str]:
    """The lines under the text. `info` is the engine's `get_server_info()`."""
    meta = result["meta_info"]
    tokens, rounds = meta["completion_tokens"], meta.get("spec_verify_ct", 0)
    ended = meta["finish_reason"]
    why = ended["type"] + (f" ({ended['matched']!r})" if "matched" in ended else "")
    lines = [
        f"{shape_name(info)}, {info['device']}, {info['is_on']['dtype']}, {info['attention_backend']}: "
        f"{meta['prompt_tokens']} prompt tokens, {tokens} new ones in {cost.total:.2f} s "
        f"({tokens / cost.total:.1f} tokens/s); ended by {why}"
    ]
    if info["speculative_algorithm"] is not None:
        per_round = f": {meta['tokens_per_round']:.2f} tokens per round (plain decoding: 1)" if rounds else ""
        lines.append(f"rounds     {rounds}, after the prefill's one token{per_round}")
        drafts = info["speculative_num_draft_tokens"] - 1
        depths = min(info["speculative_num_steps"] or drafts, drafts)
        counts = accept_counts(meta.get("spec_correct_drafts_histogram", []), depths)
        shown = [f"draft {d}: {n} of {of} ({n / of:.0%})" for d, (n, of) in enumerate(counts, 1) if of]
        lines.append("accepted   " + (", ".join(shown) or "nothing was drafted"))
    forwards = f"forwards   target {cost.target_forwards}"
    if info["speculative_algorithm"] is not None:
        forwards += f", draft {cost.draft_forwards}"
    lines.append(f"{forwards}, for {tokens} tokens")
    parts = [*cost.seconds.items(), ("rest", cost.rest)]
    lines.append("time       " + ", ".join(f"{phase} {seconds / cost.total:.1%}" for phase, seconds in parts))
    return lines


@command
def run(
    stage: Annotated[str, typer.Argument(help="A name under stages/, or a stage's directory.")],
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the request's random numbers.")] = None,
    engine_flags: dict[str, Any] | None = None,
) -> None:
    """Stream one answer with each accepted run visible, then say what it cost.

    On a terminal each round has a colour, and what the target itself added is underlined; drafts that it
    accepted are not. Elsewhere, or with NO_COLOR set, the text is plain.
    """
    found = resolve_stage(stage)
    flags = merge_flags(found, engine_flags or {})
    refuse_ranks(flags, "run")
    params: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    if seed is not None:
        params["sampling_seed"] = seed
    console = Console(highlight=False)
    with Console(stderr=True).status(f"loading {found.name}"):
        engine = found.open(**flags)
    with engine:
        (ids,) = encode_prompts(engine.tokenizer, [prompt], raw)
        info = engine.get_server_info()
        is_speculative = info["speculative_algorithm"] is not None
        streams = found.has("spec_scheduler") or not is_speculative  # else a loop answers in one piece
        is_plain = not console.is_terminal or bool(os.environ.get("NO_COLOR"))
        is_plain = is_plain or not is_speculative or not streams
        painter = Painter(console, _detokenizer(found, engine), is_plain)
        with measure(engine, step_phases(engine), counters=True) as cost:
            with refusals():
                answer = engine.generate(input_ids=ids, sampling_params=params, stream=streams)
                stream = answer if streams else [answer]
            for result, step in rounds_of(stream):
                painter.show(result["text"], step)
    if painter.shown:
        console.print("\n")
    refuse_abort(result)
    for line in summary(result, info, cost):
        console.print(Text(line), soft_wrap=True)
    if not is_plain:
        legend = Text("A colour is a round: drafts that were accepted, then ")
        console.print(legend.append("the target's own token", style="underline").append("."), soft_wrap=True)


def _detokenizer(stage: Any, engine: Any) -> Any:
    """One without stop strings: it follows the tokens, while the engine's own decides what may be shown."""
    module = import_module(f"{stage.package().__name__}.managers.detokenizer")
    return module.IncrementalDetokenizer(engine.tokenizer)
