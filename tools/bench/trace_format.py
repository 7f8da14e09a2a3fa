"""The one format of recorded runs, for every stage: `validate` says what must be true of one.

docs/data/traces/README.md describes it. The checks know nothing of an engine: what they find wrong is wrong
for whoever plays the trace.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .stages_door import BadInput
from .trace_idle import idle_summary

FORMAT, VERSION = "fledge-trace", 1

KINDS = ("prefill", "decode", "verify")
PHASES = ("prefill", "draft prefill", "forward", "draft", "verify", "draft extend", "commit")
# Of the scheduler, where a step's result may be processed behind the next step's launch.
HOST_PHASES = ("launch", "process")

Trace = dict[str, Any]


def load_trace(path: Path) -> Trace:
    """A valid trace. Raises BadInput with the first thing that is wrong."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is no trace ({error}).") from None
    validate(trace)
    return trace


def validate(trace: Trace) -> None:
    """Raise BadInput with the first thing that is wrong with a trace."""
    try:
        for problem in _problems(trace):
            raise BadInput(f"The trace is not valid: {problem}.")
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadInput(f"The trace is not valid: {type(error).__name__}: {error}.") from None


def _problems(trace: Trace) -> Iterator[str]:
    if (trace["format"], trace["version"]) != (FORMAT, VERSION):
        yield f"it is {trace['format']} version {trace['version']}, not {FORMAT} version {VERSION}"
    for name in ("stage", "engine", "provenance", "clock", "pieces", "requests", "steps"):
        if name not in trace:
            yield f"it has no {name!r}"
    if trace["clock"] not in ("host", "device"):
        yield f"its clock is {trace['clock']!r}"
    written: list[list[int]] = [[] for _ in trace["requests"]]
    rounds: list[list[int]] = [[] for _ in trace["requests"]]
    before = 0.0
    yield from _host_problems(trace["steps"])
    if "summary" in trace and trace["summary"] != idle_summary(trace["steps"]):
        yield "its summary is not what its steps give"
    for number, step in enumerate(trace["steps"]):
        for problem in _step_problems(step, trace, before):
            yield f"step {number}: {problem}"
        before = step["end_us"]
        for problem in _cache_problems(step.get("cache", []), trace["pieces"]):
            yield f"step {number}: {problem}"
        for entry in step["requests"]:
            for problem in _entry_problems(entry, step["kind"], trace, written[entry["request"]]):
                yield f"step {number}, request {entry['request']}: {problem}"
            written[entry["request"]] += entry["tokens"]
            if step["kind"] == "verify":
                rounds[entry["request"]].append(min(len(entry["tokens"]), len(entry["path"]) - 1))
    for number, (request, tokens, accepted) in enumerate(
        zip(trace["requests"], written, rounds, strict=True)
    ):
        if tokens != request["output_ids"]:
            yield f"the steps of request {number} do not make its output"
        if missing := [t for t in request["prompt_ids"] + tokens if str(t) not in trace["pieces"]]:
            yield f"token {missing[0]} of request {number} has no text in 'pieces'"
        counted = [accepted.count(count) for count in range(max(accepted, default=-1) + 1)]
        if counted != request.get("spec_correct_drafts_histogram", []):
            yield f"the rounds of request {number} accept {counted}, the engine counted something else"


def _host_problems(steps: list[dict[str, Any]]) -> Iterator[str]:
    """One thread does all of it."""
    host = sorted(
        (phase["start_us"], phase["end_us"], phase["name"], number)
        for number, step in enumerate(steps)
        for phase in step["phases"]
        if phase["name"] in HOST_PHASES
    )
    for before, after in itertools.pairwise(host):
        if before[1] > after[0]:
            yield f"{after[2]} of step {after[3]} begins inside {before[2]} of step {before[3]}"


def _step_problems(step: dict[str, Any], trace: Trace, before: float) -> Iterator[str]:
    if step["kind"] not in KINDS:
        yield f"its kind is {step['kind']!r}"
    if not before <= step["start_us"] <= step["end_us"]:
        yield "it does not follow the step before"
    host = [phase for phase in step["phases"] if phase["name"] in HOST_PHASES]
    # Work that is launched ahead may be done while the step before is still on the host.
    start = host[0]["start_us"] if host else step["start_us"]
    at = dict.fromkeys((True, False), start)
    for phase in step["phases"]:
        if phase["name"] not in PHASES + HOST_PHASES:
            yield f"there is no phase {phase['name']!r}"
        track = phase["name"] in HOST_PHASES
        if not at[track] <= phase["start_us"] <= phase["end_us"] <= step["end_us"]:
            yield f"{phase['name']} lies outside its place in time"
        at[track] = phase["end_us"]
        device = phase["device_us"]
        if device is not None and (trace["clock"] == "host" or not device[0] <= device[1]):
            yield f"{phase['name']} has no such time on the device"
    slots = [slot for entry in step["requests"] for slot in entry.get("slots", ())]
    if len(set(slots)) < len(slots):
        yield "two rows write to one slot"


def _entry_problems(entry: dict[str, Any], kind: str, trace: Trace, written: list[int]) -> Iterator[str]:
    request, tokens = trace["requests"][entry["request"]], entry["tokens"]
    if kind == "prefill":
        return
    if entry["seq_len"] != len(request["prompt_ids"]) + len(written) - 1:
        yield f"seq_len {entry['seq_len']} is not what prompt and output give"
    if kind == "decode":
        if len(tokens) > 1 or len(entry.get("slots", [0])) != 1:
            yield "a decode step gives one token and takes one slot"
        return
    if not 0 < len(tokens) <= len(entry["path"]):
        yield f"{len(tokens)} tokens came of a path of {len(entry['path'])}"
    if "tree" in entry:  # else only times and tokens were recorded
        yield from _tree_problems(entry, trace, written)


def _tree_problems(entry: dict[str, Any], trace: Trace, written: list[int]) -> Iterator[str]:
    request, tokens = trace["requests"][entry["request"]], entry["tokens"]
    tree, parents, path = entry["tree"], entry["parents"], entry["path"]
    if not len(tree) == len(parents) == len(entry["slots"]):
        yield "tokens, parents and slots of the tree differ in number"
    if not written or tree[0] != written[-1]:
        yield "the tree's root is not the last output token"
    if parents[0] != -1 or not all(0 <= parent < node for node, parent in enumerate(parents) if node):
        yield "a node stands before its parent"
    if path[:1] != [0] or any(parents[b] != a for a, b in zip(path, path[1:], strict=False)):
        yield "the accepted path is no path from the root"
    if any(tree[node] != token for node, token in zip(path[1:], tokens, strict=False)):
        yield "the tokens are not those of the path"
    if len(entry["kept_slots"]) != len(tokens) or not set(entry["kept_slots"]) <= set(entry["slots"]):
        yield "kept slots are not those of the kept tokens"
    if len(tokens) < len(path) and written + tokens != request["output_ids"]:
        yield "tokens were dropped and the request went on"
    if "candidates" in entry:
        yield from _candidate_problems(entry["candidates"], tree, parents, trace["pieces"])


def _candidate_problems(
    found: dict[str, list], tree: list[int], parents: list[int], pieces: dict[str, str]
) -> Iterator[str]:
    tokens, scores, above, nodes = (found[name] for name in ("tokens", "scores", "parents", "nodes"))
    if not len(tokens) == len(scores) == len(above):
        yield "tokens, scores and parents of the candidates differ in number"
    if any(str(token) not in pieces for token in tokens):
        yield "a candidate has no text in 'pieces'"
    for number, parent in enumerate(above):
        if not -1 <= parent < number:
            yield f"candidate {number} stands before its parent"
        if not 0 <= scores[number] <= (1.0 if parent < 0 else scores[parent]):
            yield f"candidate {number} is likelier than its parent"
    if nodes[0] != -1 or [tokens[number] for number in nodes[1:]] != tree[1:]:
        yield "the nodes are not the candidates that they name"
    if [above[number] for number in nodes[1:]] != [nodes[parent] for parent in parents[1:]]:
        yield "a node hangs elsewhere than its candidate"
    rest = set(range(len(tokens))) - set(nodes)
    if rest and max(scores[number] for number in rest) > min(scores[number] for number in nodes[1:]):
        yield "a better candidate was left out of the tree"


def _cache_problems(cache: list[dict[str, Any]], pieces: dict[str, str]) -> Iterator[str]:
    slots = [slot for edge in cache for slot in edge["slots"]]
    if len(set(slots)) < len(slots):
        yield "two entries of the prefix cache own one slot"
    for number, edge in enumerate(cache):
        if not -1 <= edge["parent"] < number or len(edge["tokens"]) != len(edge["slots"]):
            yield f"edge {number} of the prefix cache is none"
        if any(str(token) not in pieces for token in edge["tokens"]):
            yield f"edge {number} of the prefix cache has a token without text"
