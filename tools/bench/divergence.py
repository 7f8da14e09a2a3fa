"""`fledge divergence`: where a greedy text first differs from plain decoding, and whether rounding explains
it.

Verification runs other shapes through the same weights than decoding does, so in half precision two logits
that lie within rounding of each other can change places. That is no defect; anything else is. The judge is
plain decoding of the same stage at the same prefix: the scores of the two tokens that the texts disagree
about must both lie within the tolerance of the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .engine_flags import command
from .stages_door import (
    PROMPTS,
    BadInput,
    encode_prompts,
    generate,
    merge_flags,
    plain_flags,
    pool_flags,
    read_prompts,
    refuse_abort,
    resolve_stage,
    shape_name,
)

# How far apart two logits can be and still change places, by the dtype that the model runs in. Measured on
# the embedded model, plain decoding against plain prefill at the same prefixes: the gap between the two best
# moves by 0.10 (rms; 0.37 in one case of a hundred) in bfloat16, by 0.013 in float16 and by 1e-5 in float32,
# whose bound says instead what a test prompt must keep clear of. A wrong mask or position moves gaps by whole
# units.
TOLERANCE = {"float32": 1e-3, "float16": 6e-2, "bfloat16": 0.5}


@dataclass(frozen=True)
class Verdict:
    """`kind` is "yes" (identical), "rounding" or "no"; `token` is the index of the first difference in the
    output.

    `gap` is the distance in logits of the less likely of the two tokens from the best one, None where the
    texts are identical or one of them merely ends sooner.
    """

    kind: str
    token: int | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.kind == "yes":
            return "yes"
        gap = "one text ends" if self.gap is None else f"gap {self.gap:.3f}"
        return f"{self.kind} (token {self.token}, {gap})"


@dataclass(frozen=True)
class Scores:
    """What plain decoding thinks of one position: its best tokens, and the two that the texts disagree about.

    Each entry is (log probability, token id); differences of log probabilities are differences of logits.
    """

    top: list[tuple[float, int]]
    disputed: list[tuple[float, int]]

    @property
    def gap(self) -> float:
        return self.top[0][0] - min(score for score, _ in self.disputed)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, or where one ends; None if they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def verdict(
    plain: Sequence[int], other: Sequence[int], gap_at: Callable[[int], float], tolerance: float
) -> Verdict:
    """Compare a greedy output with plain decoding's.

    Args:
        gap_at: index of the first difference → the gap that plain decoding finds there; asked only where
            both texts have a token.
        tolerance: the largest gap, in logits, that counts as rounding.
    """
    index = first_divergence(plain, other)
    if index is None:
        return Verdict("yes")
    if index == min(len(plain), len(other)):
        return Verdict("no", index)
    gap = gap_at(index)
    # A gap that is not a number is no excuse.
    return Verdict("rounding" if gap <= tolerance else "no", index, gap)


def score_position(engine: Any, prefix: list[int], disputed: Sequence[int]) -> Scores:
    """Ask a plain engine for its scores after `prefix`: the top two, and those of the disputed tokens."""
    result = engine.generate(
        input_ids=prefix,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=2,
        token_ids_logprob=list(disputed),
    )
    refuse_abort(result)
    meta = result["meta_info"]
    top, asked = meta["output_top_logprobs"][0], meta["output_token_ids_logprobs"][0]
    return Scores([entry[:2] for entry in top], [entry[:2] for entry in asked])


def judge(
    engine: Any,
    prompt: list[int],
    plain: Sequence[int],
    other: Sequence[int],
    tolerance: float | None = None,
) -> Verdict:
    """The verdict on `other`, which should be what the plain `engine` gave for `prompt`.

    Args:
        tolerance: in logits; None for that of the engine's dtype.
    """

    def gap_at(index: int) -> float:
        return score_position(engine, [*prompt, *plain[:index]], [plain[index], other[index]]).gap

    return verdict(plain, other, gap_at, tolerance_of(engine) if tolerance is None else tolerance)


def tolerance_of(engine: Any) -> float:
    return TOLERANCE[engine.get_server_info()["is_on"]["dtype"]]


@command
def divergence(
    stage: Annotated[str, typer.Argument(help="A name under stages/, or a stage's directory.")],
    prompt: Annotated[str | None, typer.Option(help="One prompt.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, one a line or a JSON list. Default: eight questions."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of each answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the turn.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest gap, in logits, that is rounding. Default: by dtype.")
    ] = None,
    engine_flags: dict[str, Any] | None = None,
) -> None:
    """Find the first difference between a speculative text and plain decoding's, and say what it is.

    The verdict is "yes" (identical), "rounding" (plain decoding of this stage, at this prefix, has both
    tokens within rounding of each other) or "no". Only "no" makes the exit status 1.
    """
    found = resolve_stage(stage)
    if prompt is not None and prompts is not None:
        raise BadInput("Give --prompt or --prompts, and not both.")
    texts = [prompt] if prompt is not None else read_prompts(prompts or PROMPTS)
    flags = merge_flags(found, engine_flags or {})
    if flags.get("speculative_algorithm") is None:
        raise BadInput(
            f"{found.name} would run without speculation here, so there is nothing to hold against plain "
            "decoding: give --speculative-algorithm and --speculative-draft-model-path."
        )
    flags = pool_flags(flags, len(texts), max_new_tokens)
    console, log = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    with log.status(f"loading {found.name} twice: plain and speculative") as status:
        with found.open(**plain_flags(flags)) as plain, found.open(**flags) as other:
            name = shape_name(other.get_server_info())
            ids = encode_prompts(plain.tokenizer, texts, raw)
            status.update(f"plain decoding, {len(ids)} x {max_new_tokens} tokens")
            expected = generate(plain, ids, max_new_tokens, ignore_eos=ignore_eos)
            status.update(f"{name}, {len(ids)} x {max_new_tokens} tokens")
            got = generate(other, ids, max_new_tokens, ignore_eos=ignore_eos)
            status.update("judging")
            verdicts = []
            for number, (text, row, left, right) in enumerate(zip(texts, ids, expected, got, strict=True), 1):
                found_here = judge(plain, row, left["output_ids"], right["output_ids"], tolerance)
                verdicts.append(found_here)
                lines = _report(plain, row, left, right, found_here, name, show_text=len(texts) == 1)
                console.print(f"[bold]{number}[/bold] {escape(_short(text))}: {escape(str(found_here))}")
                for line in lines:
                    console.print(f"   {escape(line)}")
            dtype = plain.get_server_info()["is_on"]["dtype"]
            bound = tolerance_of(plain) if tolerance is None else tolerance
    counts = {kind: sum(v.kind == kind for v in verdicts) for kind in ("yes", "rounding", "no")}
    console.print(
        f"{found.name}, {name} against plain, {dtype} (rounding: a gap up to {bound:g}): "
        + ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
    )
    if counts["no"]:
        raise typer.Exit(1)


def _report(
    engine: Any, prompt: list[int], left: dict, right: dict, found: Verdict, name: str, show_text: bool
) -> list[str]:
    """Both continuations, and what plain decoding thinks of the place where they part."""
    a, b = left["output_ids"], right["output_ids"]
    width = max(len("plain"), len(name))
    if found.kind == "yes":
        if not show_text:
            return []
        return [f"{'plain':{width}}  {left['text']!r}", f"{name:{width}}  the same {len(a)} tokens"]
    start, end = (0, None) if show_text else (max(0, found.token - 8), found.token + 16)
    decode = engine.tokenizer.decode
    lines = [f"{'both':{width}}  {decode(a[start : found.token])!r}"] if found.token > start else []
    for label, ids in (("plain", a), (name, b)):
        rest = ids[found.token : end]
        lines.append(f"{label:{width}}  {decode(rest)!r}" if rest else f"{label:{width}}  ends here")
    if found.gap is not None:
        scores = score_position(engine, [*prompt, *a[: found.token]], [a[found.token], b[found.token]])
        best = {token: score for score, token in [*scores.top, *scores.disputed]}
        shown = ", ".join(f"{decode([token])!r} {score:.4f}" for token, score in best.items())
        lines.append(f"log probabilities of plain decoding here: {shown}")
    return lines


def _short(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
