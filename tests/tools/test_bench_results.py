"""`fledge bench`'s processes: scripted ones that fail, hang and are killed, and what is kept of each."""

import json
import sys
import time

import pytest

from tools.bench import bench_runs
from tools.bench.bench_process import run_job
from tools.bench.bench_results import Results, load
from tools.bench.bench_runs import Plan, run_plans
from tools.bench.bench_summary import best_per_batch, floor_seconds, spread, summarise
from tools.bench.stages_door import BadInput

HEADER = {
    "stage": "part4_worker", "sources_sha256": "a" * 64, "commit": "c" * 40, "dirty": False,
    "device": "x86_64", "versions": {"torch": "2.13.0"}, "flags": {}, "prompt_sets": [], "new_tokens": None,
    "raw": False,
}  # fmt: skip
RUN = {
    "seconds": [2.0, 1.0, 4.0], "prefill_seconds": [0.0] * 3, "requests": [8] * 3, "tokens": [2048] * 3,
    "steps": [2040] * 3, "rounds": [0] * 3,
}  # fmt: skip

# A process that does what its configurations' names say.
SCRIPT = """
import json, os, sys, time
job = json.load(sys.stdin)
def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)
for entry in job["configurations"]:
    name = entry["name"]
    say("progress", what=name)
    if name == "no load":
        say("end", configuration=name, error="ValueError: it cannot be loaded", seconds=0.1); break
    say("begin", configuration=name, loading_seconds=0.5, server={})
    say("cell", configuration=name, set="questions", batch=1, **job["run"])
    if name == "crash":
        print("Fatal: illegal address", file=sys.stderr); os._exit(3)
    if name == "hang":
        say("progress", what="hanging")
        print('{"event": "ce', end="", flush=True); time.sleep(60)
    say("end", configuration=name, error=None, seconds=3.0)
"""
COMMAND = [sys.executable, "-c", SCRIPT]


def plan(*names: str, kind: str = "engine", turn: int = 1) -> Plan:
    entries = [{"name": name, "kind": kind, "flags": {"page_size": 1}, "batches": [1]} for name in names]
    return Plan(kind, turn, {"repeat": 3, "seconds": 9.0, "configurations": entries, "run": RUN})


def paired(plans, results) -> list:
    return [(plan, results) for plan in plans]


def run(path, plans) -> tuple[dict, list[str], list[str]]:
    said: list[str] = []
    wrong = run_plans(paired(plans, Results(path, HEADER)), said.append, command=COMMAND)
    return load(path), wrong, said


def test_a_process_and_its_header(tmp_path) -> None:
    data, wrong, said = run(tmp_path / "r.json", [plan("plain"), plan("plain", turn=2)])
    assert (wrong, said) == ([], ["part4_worker plain"] * 2)
    assert {name: data[name] for name in HEADER} == HEADER and data["format"] == "fledge-bench"
    first, second = data["processes"]
    assert (first["turn"], second["turn"], first["kind"]) == (1, 2, "engine")
    assert {"commit", "dirty", "started", "flags", "batches", "repeat", "server"} <= set(first)
    assert first["cells"] == [{"set": "questions", "batch": 1, **RUN}]
    assert (first["seconds"], first["error"]) == (3.0, None)
    (row,) = data["summary"]
    assert row["tokens_per_second"] == {
        "median": 1024, "q1": 640, "q3": 1792, "min": 512, "max": 2048, "samples": 6,
    }  # fmt: skip


def test_a_configuration_that_fails_is_reported_and_the_others_go_on(tmp_path) -> None:
    data, wrong, _ = run(tmp_path / "r.json", [plan("no load"), plan("crash"), plan("plain")])
    assert wrong == [
        "no load: ValueError: it cannot be loaded", "crash: the process ended with 3: Fatal: illegal address",
    ]  # fmt: skip
    errors = {process["configuration"]: process["error"] for process in data["processes"]}
    assert errors["plain"] is None and "illegal" in errors["crash"] and "loaded" in errors["no load"]
    assert [len(process["cells"]) for process in data["processes"]] == [0, 1, 1]  # numbers before it are kept


def test_the_rest_of_a_shared_process_gets_a_new_one(tmp_path) -> None:
    data, wrong, said = run(tmp_path / "r.json", [plan("a", "crash", "b", "no load", "c", kind="tune")])
    assert len(wrong) == 2 and said == [f"part4_worker {n}" for n in ("a", "crash", "b", "no load", "c")]
    assert best_per_batch(data, "tune") == {1: "a"}
    assert [p["configuration"] for p in data["processes"] if p["error"] is None] == ["a", "b", "c"]


def test_a_process_that_hangs_is_ended_and_keeps_its_numbers(tmp_path, monkeypatch) -> None:
    class Timer:
        """Rings when the process says that it hangs."""

        def __init__(self, seconds: float, ring):
            assert 0 < seconds <= 900
            self.ring, Timer.last = ring, self

        def start(self) -> None:
            pass

        cancel = start

    monkeypatch.setattr(bench_runs.threading, "Timer", Timer)
    path, wanted = tmp_path / "r.json", [plan("hang"), plan("plain")]
    wrong = run_plans(
        paired(wanted, Results(path, HEADER)),
        lambda what: what.endswith("hanging") and Timer.last.ring(),
        command=COMMAND,
    )
    assert wrong == ["hang: its time was over before it had finished"]
    assert [len(process["cells"]) for process in load(path)["processes"]] == [1, 1]


def test_nothing_begins_when_the_time_is_over(tmp_path) -> None:
    results, said = Results(tmp_path / "r.json", HEADER), []
    (wrong,) = run_plans(paired([plan("plain"), plan("a")], results), said.append, time.monotonic(), COMMAND)
    assert wrong == "The time is over: 2 processes did not run. The same command goes on." and said == []


def test_a_second_run_takes_the_file_up(tmp_path) -> None:
    path = tmp_path / "r.json"
    run(path, [plan("no load"), plan("plain")])
    data, _, _ = run(path, [plan("plain", turn=2), plan("no load")])
    found = [(p["configuration"], p["turn"], len(p["cells"])) for p in data["processes"]]
    # A try that measured nothing makes room for the next; numbers never do.
    assert found == [("plain", 1, 1), ("plain", 2, 1), ("no load", 1, 0)]


def test_numbers_of_another_machine_do_not_mix(tmp_path) -> None:
    path = tmp_path / "r.json"
    run(path, [plan("plain")])
    others = {"device": "NVIDIA H200", "versions": {"torch": "3"}}
    for name, value in others.items():
        with pytest.raises(BadInput, match=f"was measured with another {name}: .* --fresh"):
            Results(path, HEADER | {name: value})
    # Committing results changes the commit and not the code.
    assert Results(path, HEADER | {"commit": "d" * 40}).data["processes"]
    fresh = Results(path, HEADER | {"device": "NVIDIA H200"}, fresh=True)
    assert fresh.data["processes"] == [] and path.exists()
    path.write_text("{}")
    with pytest.raises(BadInput, match="is no result file"):
        Results(path, HEADER)


def test_numbers_of_earlier_code_stay_until_they_are_measured_again(tmp_path) -> None:
    """Cell by cell, those of both turns at once; what is said of the file is of the code as it is."""
    path, older, newer = tmp_path / "r.json", "a" * 64, "b" * 64
    data, _, _ = run(path, [plan("plain"), plan("plain", turn=2), plan("chain")])
    for process in data["processes"]:
        del process["sources_sha256"]  # as in files of before
        process["steady"] = [{"batch": batch, "rounds": [], "phases": {}, "device": []} for batch in (1, 8)]
    data["processes"][1]["cells"].append({"set": "questions", "batch": 8, **RUN})
    path.write_text(json.dumps(data))
    results = Results(path, HEADER | {"sources_sha256": newer, "commit": "d" * 40})
    assert results.missing_batches("engine", "plain", 2, (1, 8), ["questions"], True) == (1, 8)
    process = results.begin({"kind": "engine", "configuration": "plain", "turn": 1})
    event = {"configuration": "plain", "batch": 1}
    results.take(process, {"event": "cell", "set": "questions", **event, **RUN})
    results.take(process, {"event": "steady", "rounds": [], "phases": {}, "device": [], **event})
    data = load(path)
    assert (data["sources_sha256"], data["commit"]) == (newer, "d" * 40)
    batches = [[entry["batch"] for entry in p["cells"] + p["steady"]] for p in data["processes"]]
    assert batches == [[8], [8, 8], [1, 1, 8], [1, 1]]
    assert [p["configuration"] for p in data["processes"]] == ["plain", "plain", "chain", "plain"]
    assert [p["sources_sha256"] for p in data["processes"]] == [older, older, older, newer]
    rows = {(row["configuration"], row["batch"]): row for row in data["summary"]}
    assert rows["plain", 1]["tokens_per_second"]["samples"] == 3 and rows["plain", 8]["over_plain"] == 1.0
    assert rows["chain", 1]["over_plain"] is None  # plain is of other code than it
    assert results.missing_batches("engine", "plain", 1, (1, 8), ["questions"], True) == (8,)


def test_every_cell_is_on_disk_before_the_next(tmp_path) -> None:
    path = tmp_path / "r.json"
    results = Results(path, HEADER)
    process = results.begin({"kind": "engine", "configuration": "plain", "turn": 1})
    results.take(process, {"event": "begin", "configuration": "plain", "loading_seconds": 1.0})
    for batch in (1, 8):
        event = {"event": "cell", "configuration": "plain", "set": "questions", "batch": batch, **RUN}
        results.take(process, event)
        assert [entry["batch"] for entry in load(path)["processes"][0]["cells"]] == [1, 8][: batch // 8 + 1]
    assert "configuration" not in load(path)["processes"][0]["cells"][0]


def test_a_job_stops_where_an_engine_fails(capfd) -> None:
    events: list[dict] = []
    entry = {"kind": "engine", "flags": {"model_path": "/no/such/model", "device": "cpu"}, "batches": [1]}
    job = {"stage": "part4_worker", "configurations": [{"name": "a", **entry}, {"name": "b", **entry}]}
    run_job(job, lambda event, **more: events.append({"event": event, **more}))
    assert [event["event"] for event in events] == ["progress", "end"]
    assert "BadInput" in events[-1]["error"] and "/no/such/model" in events[-1]["error"]
    json.dumps(events)


# reckoning


def process(name: str, kind: str = "engine", **more) -> dict:
    return {"kind": kind, "configuration": name, "cells": [], "steady": [], "result": None} | more


def cell(seconds: list[float], tokens: int, rounds: int, steps: int, batch: int = 1) -> dict:
    counts = {"prefill_seconds": 0.5, "requests": 8, "tokens": tokens, "steps": steps, "rounds": rounds}
    columns = {name: [value] * len(seconds) for name, value in counts.items()}
    return {"set": "questions", "batch": batch, "seconds": seconds, **columns}


FLOOR = {
    "weight_bytes": {"target": 4_000_000, "draft": 1_000_000, "lm_head": 500_000},
    "copy_bytes_per_second": [1e9, 3e9, 2e9],
}


def test_medians_spreads_and_ratios() -> None:
    rounds = {"batch": 1, "context": 9, "rounds": [0.004, 0.002, 0.003], "phases": {}}
    one, two = rounds | {"device": [0.001, 0.002]}, rounds | {"device": [0.0025]}
    data = {
        "processes": [
            process("plain", cells=[cell([2.0, 4.0], 800, 0, 792)]),
            process("chain 3/1/4", cells=[cell([1.5], 800, 396, 396)], steady=[one]),
            process("chain 3/1/4", cells=[cell([2.5, 1.5], 800, 396, 396)], steady=[two]),
            process("chain 3/1/4", kind="tune", cells=[cell([0.1], 800, 396, 396)]),  # no result of its own
            process("floor", kind="floor", result=FLOOR),
        ]
    }
    plain, chain = summarise(data)
    assert plain["tokens_per_second"]["median"] == 300 and plain["over_plain"] == 1.0
    assert plain["tokens_per_round"] == 1.0 and plain["host_seconds"] is None
    assert plain["step_seconds"] == pytest.approx(((1.5 + 3.5) / 2) / 792)
    assert plain["over_floor"] == pytest.approx(plain["step_seconds"] / 0.002)
    speeds = chain["tokens_per_second"]
    assert (speeds["samples"], speeds["min"], speeds["median"]) == (3, 320, pytest.approx(800 / 1.5))
    assert chain["tokens_per_round"] == 2.0 and chain["over_plain"] == pytest.approx(800 / 1.5 / 300)
    # One of three rounds stands next to the replays, 3 ms: 1.5 ms of it were the device's, or 2.5 ms.
    assert chain["host_seconds"] == pytest.approx((0.0015 + 0.0005) / 2)
    assert chain["host_resolution"] == pytest.approx(0.0005 / 2)
    assert plain["host_resolution"] is None and plain["process_medians"] == [300]
    assert chain["process_medians"] == pytest.approx([800 / 1.5, (320 + 800 / 1.5) / 2])
    assert chain["prefill_share"] == pytest.approx(1 / 3)
    # A round reads the target once and the draft three times: twice to draft, once to extend.
    assert floor_seconds(data, "chain 3/1/4") == pytest.approx(7e6 / 2e9)


def test_a_spread_of_one_sample() -> None:
    assert spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0, "min": 3.0, "max": 3.0, "samples": 1}


def test_the_best_shape_of_each_batch() -> None:
    tried = {"plain": [1.0, 1.0], "chain 1/1/2": [4.0, 2.0], "tree 3/4/8": [3.0, 3.0]}
    cells = {name: [cell([s], 100, 9, 9, batch) for batch, s in zip((1, 64), seconds, strict=True)]
             for name, seconds in tried.items()}  # fmt: skip
    data = {"processes": [process(name, kind="tune", cells=found) for name, found in cells.items()]}
    assert best_per_batch(data, "tune") == {1: "tree 3/4/8", 64: "chain 1/1/2"}  # plain is no shape
