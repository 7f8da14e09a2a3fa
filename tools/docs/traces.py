"""What the step player plays: every recorded trace as a script, and each of them as a table of words."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from ..bench.stages_door import BadInput
from ..bench.tables import Page, changed_since
from ..bench.trace_format import Trace, load_trace
from .page import SNIPPETS, Problem, not_yet, table

MISSING = (
    'No trace is recorded. `fledge trace part4_worker "…" --out docs/data/traces/part4_worker.json` records '
    "one; the player and this table stand here after the next build."
)

PAGE = Page(str, is_built=True)


def files(repo: Path) -> dict[str, str]:
    """The player's data, which a page loads from a file too, and the same in words."""
    try:
        found = {path.stem: load_trace(path) for path in sorted((repo / "docs/data/traces").glob("*.json"))}
    except BadInput as error:
        raise Problem(str(error)) from None
    played = {name: trace | {"about": about(trace)} for name, trace in found.items()}
    data = json.dumps(played, ensure_ascii=False, separators=(",", ":"))
    # "</" may not stand inside a script element; the data is loaded as a file, and yet.
    script = "window.FLEDGE_TRACES = " + data.replace("</", "<\\/") + ";"
    words = "\n\n".join(in_words(name, trace) for name, trace in found.items()) or not_yet(MISSING)
    return {"traces.js": script, f"{SNIPPETS}/traces.md": words}


def in_words(name: str, trace: Trace) -> str:
    """A trace as tables, a line for each step of each request."""
    parts = [f"**{name}**: {about(trace)}"]
    for number, request in enumerate(trace["requests"]):
        parts.append(f"Request {number}: “{html.escape(request.get('prompt', ''))}”")
        rows = [
            [str(at), *line(entry, step, trace)]
            for at, step in enumerate(trace["steps"])
            for entry in step["requests"]
            if entry["request"] == number
        ]
        parts.append(table(["step", "what ran", "proposed", "accepted", "tokens", "slots", "ms"], rows))
    return "\n\n".join(parts)


def line(entry: dict[str, Any], step: dict[str, Any], trace: Trace) -> list[str]:
    """One step of one request: cells of the table."""
    text = "`" + shown("".join(trace["pieces"][str(token)] for token in entry["tokens"])) + "`"
    ms = f"{(step['end_us'] - step['start_us']) / 1e3:.2f}"
    if step["kind"] == "prefill":
        rows = entry["seq_len"] - entry["cached"]
        return [f"prefill of {rows} tokens, {entry['cached']} cached", "", "", text, "", ms]
    if step["kind"] == "decode":
        slots = "1 of those reserved" if "reserved" in entry else "1 taken"
        return ["one forward", "", "", text, slots, ms]
    nodes, kept = len(entry["tree"]), len(entry["kept_slots"])
    proposed = str(nodes - 1)
    if "candidates" in entry:
        proposed += f" of {len(entry['candidates']['tokens'])}"
    slots = f"{len(entry['draft_slots'])} scratch, {nodes} taken, {kept} kept"
    if "reserved" in entry:
        slots = f"{nodes} of those reserved, {kept} kept"
    return ["round", proposed, str(len(entry["path"]) - 1), text, slots, ms]


def shown(text: str) -> str:
    """Text for a code span: spaces and line ends have a sign, and nothing ends the span."""
    return text.replace(" ", "·").replace("\n", "↵").replace("`", "ˋ")


def about(trace: Trace) -> str:
    """Where a trace comes from, and what has changed since."""
    source, engine = trace["provenance"], trace["engine"]
    clock = "times are the device's" if trace["clock"] == "device" else "times are the host's clock"
    since = changed_since(trace["stage"], trace["sources_sha256"], source["commit"], PAGE)
    return (
        f"{engine['shape']} on {source['device']}, {engine['attention_backend']}, "
        f"torch {source['versions']['torch']}; {clock}; "
        f"recorded at commit {(source['commit'] or 'unknown')[:10]}{since}."
    )
