"""Starts the processes of `fledge bench` one after another and collects what they say."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
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
    plans: Sequence[Plan],
    results: Results,
    advance: Callable[[str], None],
    deadline: float = float("inf"),
    command: Sequence[str] = COMMAND,
) -> list[str]:
    """Run the processes in order; returns what went wrong, a sentence each.

    A configuration that fails is reported and the others go on; one that shares its process with others is
    left out and the rest get a new process. `deadline` is a `time.monotonic()`: what runs then is ended.
    """
    wrong: list[str] = []
    waiting = list(plans)
    while waiting:
        if time.monotonic() >= deadline:
            wrong.append(f"The time is over: {len(waiting)} processes did not run. The same command goes on.")
            break
        plan = waiting.pop(0)
        done, error = _run(plan, results, advance, deadline, command)
        rest = plan.job["configurations"][done:]
        if error is not None and rest:
            name = rest[0]["name"]
            wrong.append(f"{name}: {error}")
            _note_error(results, plan, name, error)
            if rest[1:]:
                waiting.insert(0, Plan(plan.kind, plan.turn, plan.job | {"configurations": rest[1:]}))
    return wrong


def _run(
    plan: Plan, results: Results, advance: Callable[[str], None], deadline: float, command: Sequence[str]
) -> tuple[int, str | None]:
    """Run one process; how many of its configurations came to their end, and why the next one did not."""
    commit, dirty = commit_and_dirty()
    about = {"kind": plan.kind, "turn": plan.turn, "commit": commit, "dirty": dirty}
    configurations = {entry["name"]: entry for entry in plan.job["configurations"]}
    settings = {key: plan.job[key] for key in ("repeat", "seconds") if key in plan.job}
    seconds = max(0.0, min(deadline - time.monotonic(), PROCESS_SECONDS))
    done, process, error = 0, None, None
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            child.stdin.write(json.dumps(plan.job))
            child.stdin.close()
            for line in child.stdout:
                try:
                    event = json.loads(line)
                except ValueError:  # killed in the middle of a line
                    break
                if event["event"] == "progress":
                    advance(event["what"])
                    continue
                if event["event"] == "begin":
                    entry = configurations[event["configuration"]]
                    process = results.begin(
                        {"configuration": entry["name"], **about, "started": _now(), **settings}
                        | {key: entry[key] for key in ("flags", "batches") if key in entry}
                    )
                if event["event"] == "end" and event["error"]:
                    error = event["error"]
                elif process is not None:
                    results.take(process, event)
                    done += event["event"] == "end"
            child.wait()
        except BrokenPipeError:
            child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
        if error is None and (child.returncode or done < len(configurations)):
            complaints.seek(0)
            last = [line for line in complaints.read().splitlines() if line.strip()][-1:]
            error = f"the process ended with {child.returncode}" + (f": {last[0]}" if last else "")
            if is_over.is_set():
                error = "its time was over before it had finished"
    return done, error


def _note_error(results: Results, plan: Plan, name: str, error: str) -> None:
    """Keep an error with the process's own numbers, or alone where it has none."""
    last = results.data["processes"][-1] if results.data["processes"] else None
    if last is None or (last["configuration"], last["turn"], last["kind"]) != (name, plan.turn, plan.kind):
        last = results.begin({"configuration": name, "kind": plan.kind, "turn": plan.turn, "started": _now()})
    last["error"] = error
    results.save()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
