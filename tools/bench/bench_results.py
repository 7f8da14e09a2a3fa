"""The file that `fledge bench` fills: a header that says where numbers come from, and every process's own.

It is written after every event of a process, so an interrupted run loses the cell it was at and nothing else;
the same command run again measures what is missing. Once a stage's code has changed, all is: older numbers
stay, each until it is measured again. docs/data/bench/README.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..json_files import write
from .bench_summary import summarise
from .stages_door import BadInput

FORMAT, VERSION = "fledge-bench", 1

# Files whose headers differ in one of these hold numbers that must not stand side by side.
IDENTITY = (
    "stage",
    "device",
    "driver",
    "versions",
    "flags",
    "prompt_sets",
    "new_tokens",
    "raw",
)

Event = dict[str, Any]


class Results:
    """One result file in memory and on disk."""

    def __init__(self, path: Path, header: dict[str, Any], fresh: bool = False):
        """Take up the file at `path` if it has the same identity, else begin it.

        Raises BadInput for a file that is something else, unless `fresh` throws it away.
        """
        self.path = path
        self.data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **header, "processes": []}
        if fresh or not path.exists():
            return
        old = load(path)
        if differing := [name for name in IDENTITY if old.get(name) != json_like(header.get(name))]:
            raise BadInput(
                f"{path} was measured with another {' and '.join(differing)}: "
                "give another --out, or --fresh to throw its numbers away."
            )
        self.data = {name: value for name, value in old.items() if name != "summary"}
        for process in self.data["processes"]:
            process.setdefault("sources_sha256", old["sources_sha256"])
        if old["sources_sha256"] != header["sources_sha256"]:
            self.data |= header

    def begin(self, process: dict[str, Any]) -> dict[str, Any]:
        """Add a process; what it says goes into its "cells", "steady" and "result".

        It stands in for an earlier try that measured nothing.
        """
        same = ("kind", "configuration", "turn")
        self.data["processes"] = [
            p
            for p in self.data["processes"]
            if _has_numbers(p) or any(p[key] != process[key] for key in same)
        ]
        process = {**process, "sources_sha256": self.data["sources_sha256"]}
        process |= {"cells": [], "steady": [], "result": None, "error": None, "seconds": None}
        self.data["processes"].append(process)
        return process

    def take(self, process: dict[str, Any], event: Event) -> None:
        """Enter an event of a process and save the file."""
        kind = event["event"]
        content = {key: value for key, value in event.items() if key not in ("event", "configuration")}
        if kind == "cell":
            self._drop_older(process, "cells", {name: content[name] for name in ("set", "batch")})
            process["cells"].append(content)
        elif kind == "steady":
            self._drop_older(process, "steady", {"batch": content["batch"]})
            process["steady"].append(content)
        elif kind == "result":
            process["result"] = content
        elif kind in ("begin", "end"):
            process.update(content)
        else:
            return
        self.save()

    def _drop_older(self, process: dict[str, Any], column: str, where: dict[str, Any]) -> None:
        """Drop what the same configuration gave for the same cell when the stage's code was another."""
        for other in self.processes(process["kind"], process["configuration"]):
            if other["sources_sha256"] != process["sources_sha256"]:
                other[column] = [entry for entry in other[column] if not where.items() <= entry.items()]

    def save(self) -> None:
        """Write the file; processes that have measured nothing and failed at nothing are left out."""
        kept = [p for p in self.data["processes"] if _has_numbers(p) or p["error"]]
        write(self.path, {**self.data, "summary": summarise(self.data), "processes": kept})

    # ---- what is there ----

    def processes(self, kind: str, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Processes of a kind ("engine", "tune", "floor", "hf"), of one configuration or of all."""
        for process in self.data["processes"]:
            if process["kind"] == kind and name in (None, process["configuration"]):
                yield process

    def missing_batches(
        self, kind: str, name: str, turn: int, batches: Iterable[int], sets: Iterable[str], steady: bool
    ) -> tuple[int, ...]:
        """Where a turn of a configuration lacks a cell or, if wanted, steady rounds: of the code as it is."""
        found: set[tuple[str, int]] = set()
        for process in self.processes(kind, name):
            if process["turn"] == turn and process["sources_sha256"] == self.data["sources_sha256"]:
                found |= {(cell["set"], cell["batch"]) for cell in process["cells"]}
                found |= {("steady", entry["batch"]) for entry in process["steady"]}
        wanted = [*sets, *(["steady"] if steady else [])]
        return tuple(batch for batch in batches if any((name, batch) not in found for name in wanted))

    def has_result(self, kind: str, name: str) -> bool:
        """Whether a process that gives one result has given it."""
        return any(process["result"] for process in self.processes(kind, name))


def result_path(folder: Path, stage: str, backend: str) -> Path:
    """The file in `folder` that holds a stage's results with an attention backend."""
    return folder / f"{stage}-{backend}.json"


def load(path: Path) -> dict[str, Any]:
    """A result file. Raises BadInput where it is none of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) == (FORMAT, VERSION):
            return data
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{path} is no result file of `fledge bench`, version {VERSION}.")


def _has_numbers(process: dict[str, Any]) -> bool:
    return bool(process["cells"] or process["steady"] or process["result"])


def json_like(data: Any) -> Any:
    """`data` as it comes back out of a JSON file."""
    return json.loads(json.dumps(data))
