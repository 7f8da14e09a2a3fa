"""Starts the processes of `fledge bench` one after another and collects what they say."""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..provenance import REPO, commit_and_dirty
from .bench_results import Results

COMMAND = [sys.executable, "-m", "tools.bench.bench_process"]
PROCESS_SECONDS = 900.0  # more than any configuration needs; a process that hangs must not hang the rest


@dataclass(frozen=True)
class Plan:
    """One process: which configurations it measures, in which of a configuration's turns.

    `kind` is "engine", "tune", "floor" or "hf"; `job` is what the process reads, see bench_process.
    """

    kind: str
    turn: int
    job: dict[str, Any]


def run_plans(
    plans: Sequence[tuple[Plan, Results]],
    advance: Callable[[str], None],
    deadline: float = float("inf"),
    command: Sequence[str] = COMMAND,
) -> list[str]:
    """Run the processes in order, each for its result file; returns what went wrong, a sentence each.

    A configuration that fails is reported and the others go on; one that shares its process with others is
    left out and the rest get a new process. `deadline` is a `time.monotonic()`: what runs then is ended.
    """
    wrong: list[str] = []
    waiting = list(plans)
    while waiting:
        if time.monotonic() >= deadline:
            wrong.append(f"The time is over: {len(waiting)} processes did not run. The same command goes on.")
            break
        plan, results = waiting.pop(0)
        done, error = _run(plan, results, advance, deadline, command)
        rest = plan.job["configurations"][done:]
        if error is not None and rest:
            name = rest[0]["name"]
            wrong.append(f"{name}: {error}")
            _note_error(results, plan, name, error)
            if rest[1:]:
                others = Plan(plan.kind, plan.turn, plan.job | {"configurations": rest[1:]})
                waiting.insert(0, (others, results))
    return wrong


def _run(
    plan: Plan, results: Results, advance: Callable[[str], None], deadline: float, command: Sequence[str]
) -> tuple[int, str | None]:
    """Run one process; how many of its configurations came to their end, and why the next one did not."""
    seconds = max(0.0, min(deadline - time.monotonic(), PROCESS_SECONDS))
    is_over = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as child,
    ):

        def end() -> None:
            is_over.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read its job
                child.stdin.write(json.dumps(plan.job))
                child.stdin.close()
            done, error = _collect(plan, child.stdout, results, advance)
        finally:
            timer.cancel()
            if child.poll() is None and sys.exc_info()[0] is not None:  # interrupted: it must not live on
                child.kill()
        code = child.wait()
        if error is None and done < len(plan.job["configurations"]):
            complaints.seek(0)
            last = [line for line in complaints.read().splitlines() if line.strip()][-1:]
            error = f"the process ended with {code}" + (f": {last[0]}" if last else "")
            if is_over.is_set():
                error = "its time was over before it had finished"
    return done, error


def _collect(
    plan: Plan, lines: Iterable[str], results: Results, advance: Callable[[str], None]
) -> tuple[int, str | None]:
    """Enter what a process says; how many configurations came to their end, and the error of the next."""
    commit, dirty = commit_and_dirty()
    about = {"kind": plan.kind, "turn": plan.turn, "commit": commit, "dirty": dirty}
    about |= {key: plan.job[key] for key in ("repeat", "seconds") if key in plan.job}
    configurations = {entry["name"]: entry for entry in plan.job["configurations"]}
    done, process = 0, None
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # killed in the middle of a line
            break
        if event["event"] == "progress":
            advance(f"{results.data['stage']} {event['what']}")
            continue
        if event["event"] == "end" and event["error"]:
            return done, event["error"]
        if event["event"] == "begin":
            entry = configurations[event["configuration"]]
            own = {key: entry[key] for key in ("flags", "batches") if key in entry}
            process = results.begin({"configuration": entry["name"], **about, "started": _now(), **own})
        results.take(process, event)
        done += event["event"] == "end"
    return done, None


def _note_error(results: Results, plan: Plan, name: str, error: str) -> None:
    """Keep an error with the process's own numbers, or alone where it has none."""
    last = results.data["processes"][-1] if results.data["processes"] else None
    if last is None or (last["configuration"], last["turn"], last["kind"]) != (name, plan.turn, plan.kind):
        last = results.begin({"configuration": name, "kind": plan.kind, "turn": plan.turn, "started": _now()})
    last["error"] = error
    results.save()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
