"""`fledge trace`: every round of an answer as one JSON file and as a timeline in the terminal."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..json_files import write
from ..provenance import provenance, sources_sha256
from .engine_flags import command
from .prompt_sets import load_sets, waves
from .stages_door import (
    BadInput,
    encode_prompts,
    merge_flags,
    pool_flags,
    refuse_ranks,
    resolve_stage,
    shape_name,
)
from .trace_format import Trace, load_trace, validate
from .trace_idle import idle_summary

# Phase → its letter and colour in the timeline; whatever a step has besides is the host's.
LOOK = {
    "prefill": ("P", "blue"),
    "draft prefill": ("p", "bright_blue"),
    "forward": ("F", "blue"),
    "draft": ("D", "cyan"),
    "verify": ("V", "yellow"),
    "draft extend": ("E", "green"),
    "host": (".", "bright_black"),
}
BAR = 48  # characters that the longest round takes
ENGINE = ("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk")
ENGINE += ("speculative_num_draft_tokens", "attention_backend", "device", "page_size", "is_on")


def split_of(step: dict[str, Any]) -> dict[str, float]:
    """Microseconds of a step by phase; "host" is what is left of it. On a GPU the phases are the device's."""
    found: dict[str, float] = {}
    for phase in step["phases"]:
        if phase["name"] in LOOK:
            start, end = phase["device_us"] or (phase["start_us"], phase["end_us"])
            found[phase["name"]] = found.get(phase["name"], 0.0) + end - start
    found["host"] = max(0.0, step["end_us"] - step["start_us"] - sum(found.values()))
    return found


def timeline(trace: Trace, coloured: bool) -> Iterator[Text]:
    """A line for each step: its length, where it went, what it accepted, and the text that came of it."""
    steps, pieces = trace["steps"], trace["pieces"]
    later = [step["end_us"] - step["start_us"] for step in steps if step["kind"] != "prefill"]
    scale = BAR / max(later or [step["end_us"] - step["start_us"] for step in steps])
    for number, step in enumerate(steps):
        total = step["end_us"] - step["start_us"]
        line = Text(f"{number:4} {total / 1e3:8.3f} ms ")
        room = BAR
        for name, length in split_of(step).items():
            letter, colour = LOOK[name]
            width = min(room, round(length * scale))
            room -= width
            line.append(("█" if coloured else letter) * width, style=colour if coloured else "")
        line.append(" " * room + f" {_accepted(step):>7}  ")
        texts = ["".join(pieces[str(token)] for token in entry["tokens"]) for entry in step["requests"]]
        line.append(" | ".join(repr(text)[1:-1] for text in texts))
        yield line


def _accepted(step: dict[str, Any]) -> str:
    """Accepted and proposed drafts of all requests, "3/7"; "late" where all had ended before the result."""
    if step["kind"] != "verify":
        return ""
    if not step["requests"]:
        return "late"
    accepted = sum(len(entry["path"]) - 1 for entry in step["requests"])
    if "tree" not in step["requests"][0]:
        return str(accepted)
    return f"{accepted}/{sum(len(entry['tree']) - 1 for entry in step['requests'])}"


def summary(trace: Trace) -> list[str]:
    """The lines under the timeline: what a median step or round is made of."""
    steps = [step for step in trace["steps"] if step["kind"] != "prefill"]
    lines = []
    if steps:
        what = "rounds" if steps[0]["kind"] == "verify" else "steps"
        tokens = sum(len(entry["tokens"]) for step in steps for entry in step["requests"])
        rows = sum(len(step["requests"]) for step in steps)
        length = statistics.median(step["end_us"] - step["start_us"] for step in steps)
        each = f", {tokens / rows:.2f} tokens each" if rows else ""
        lines.append(f"{len(steps)} {what} of {length / 1e3:.3f} ms{each}")
        splits = [split_of(step) for step in steps]
        parts = [(name, statistics.median(split.get(name, 0.0) for split in splits)) for name in splits[0]]
        whose = "on the device" if trace["clock"] == "device" else "on the clock"
        lines.append(f"medians {whose}: " + ", ".join(f"{name} {us:.0f} µs" for name, us in parts))
    if idle := idle_summary(trace["steps"]):
        who = "the GPU is idle" if trace["clock"] == "device" else "no phase runs"
        lines.append(
            f"between the end of one round's work and that of the next {who} for {idle['idle_share']:.1%}: "
            f"medians {idle['idle_us']:.0f} of {idle['round_us']:.0f} µs in {idle['rounds']} rounds"
        )
    return lines


def show(trace: Trace, console: Console) -> None:
    """Print a trace's timeline and what it sums up to."""
    coloured = console.is_terminal and not os.environ.get("NO_COLOR")
    legend = Text("     ")
    used = [name for name in LOOK if any(name in split_of(step) for step in trace["steps"])]
    for name in used:
        letter, colour = LOOK[name]
        legend.append("█ " if coloured else f"{letter} ", style=colour if coloured else "")
        legend.append(f"{name}  ")
    console.print(legend, soft_wrap=True)
    for line in timeline(trace, coloured):
        line.truncate(max(console.width, 100), overflow="ellipsis")
        console.print(line, soft_wrap=True)
    for sentence in summary(trace):
        console.print(Text(sentence), soft_wrap=True)


@command
def trace(
    stage: Annotated[
        str, typer.Argument(help="A name under stages/, a stage's directory, or a recorded trace to show.")
    ],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="What to ask.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of each answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on past the end of turn.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="So many held-out prompts instead; times and tokens only, no trees."),
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the trace to this file.")] = None,
    engine_flags: dict[str, Any] | None = None,
) -> None:
    """Record draft, verify, draft extend and host time of every round, with its tree and accepted path.

    Prints a timeline and for how much of a round the device is idle; --out keeps the recording
    (docs/data/traces/README.md describes it). All prompts are one batch, decoded greedily.
    """
    console = Console(highlight=False)
    if Path(stage).is_file():
        if prompts or engine_flags or out or batch:
            raise BadInput(f"{stage} is a recorded trace: give it alone to see it, or a stage to record one.")
        show(load_trace(Path(stage)), console)
        return
    found = resolve_stage(stage)
    if batch and prompts:
        raise BadInput(f"--batch {batch} has prompts of its own: leave it out, or yours.")
    if batch:
        (prompts,) = waves(load_sets()["held-out"].questions, batch)[:1]
    if not prompts:
        raise BadInput(f'Give at least one prompt: fledge trace {stage} "What is the capital of France?"')
    from .trace_record import record
    from .trace_trees import Growth

    given = engine_flags or {}
    flags = merge_flags(found, ({"max_running_requests": batch} if batch else {}) | given)
    if batch:
        flags = pool_flags(flags, batch, max_new_tokens)
    refuse_ranks(flags, "trace")
    with Growth().watching(found.package()) as growth:
        with Console(stderr=True).status(f"loading {found.name}"):
            engine = found.open(**flags)
        with engine:
            info = engine.get_server_info()
            ids = encode_prompts(engine.tokenizer, prompts, raw)
            recorded = record(
                engine, growth, ids, max_new_tokens, has_trees=batch is None, ignore_eos=ignore_eos
            )
    for request, prompt in zip(recorded["requests"], prompts, strict=True):
        request["prompt"] = prompt
    body = {name: recorded.pop(name) for name in ("pieces", "requests", "steps")}
    recorded |= {
        "stage": found.name,
        "sources_sha256": sources_sha256(found.path),
        "provenance": provenance(info["device"]),
        "engine": {"shape": shape_name(info), "flags": flags} | {name: info[name] for name in ENGINE},
        **body,
    }
    validate(recorded)
    show(recorded, console)
    if out is not None:
        write(out, recorded, digits=10)  # whole microseconds of hours
        console.print(f"written to {out}", soft_wrap=True)
