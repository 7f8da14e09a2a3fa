"""The tables of `fledge bench`: the README's are those of the committed files, and what each cell means."""

import io
import json
import re

import pytest
from rich.console import Console

from tools import json_files
from tools.bench import bench_report
from tools.bench.bars_report import REACHED
from tools.bench.bench_report import DOCUMENTS, FOLDER, render, rendered, table_of
from tools.bench.bench_results import load
from tools.bench.pairs_summary import load_pairs
from tools.bench.stages_door import STAGES, Stage
from tools.bench.tables import Page, about_of
from tools.provenance import REPO, sources_sha256

GOALS = json.loads((FOLDER / "goals.json").read_text(encoding="utf-8"))
FLOOR = {
    "weight_bytes": {"target": 4_000_000, "draft": 1_000_000, "lm_head": 1},
    "copy_bytes_per_second": [2e9],
}


def cell(batch: int, speed: float, per_round: float = 1.0, prompts: str = "questions") -> dict:
    """Three runs of 1,608 tokens from 8 requests, the middle one at `speed` tokens/s."""
    seconds = 1608 / speed
    rounds = round(1600 / per_round) if per_round > 1 else 0
    columns = {
        "requests": 8,
        "tokens": 1608,
        "steps": 1000,
        "rounds": rounds,
        "prefill_seconds": 0.1 * seconds,
    }
    return {"set": prompts, "batch": batch, "seconds": [seconds, 0.8 * seconds, 2 * seconds]} | {
        name: [value] * 3 for name, value in columns.items()
    }


def steady(*rounds: float, **phases: float) -> dict:
    parts = {name.replace("_", " "): [seconds] for name, seconds in phases.items()}
    device = [sum(phases.values())]
    return {"batch": 1, "context": 99, "rounds": [*rounds], "phases": parts, "device": device}


def process(name: str, cells: list[dict], *rounds: dict, kind: str = "engine", result=None) -> dict:
    about = {"kind": kind, "configuration": name, "turn": 1, "commit": "c0ffee" + "0" * 34, "dirty": False}
    return about | {"cells": cells, "steady": list(rounds), "result": result, "error": None}


def measured(
    folder,
    *processes: dict,
    device: str = "NVIDIA H200",
    backend: str = "triton",
    stage: str = "part4_worker",
) -> None:
    data = {"format": "fledge-bench", "version": 1, "device": device, "driver": "580.1",
            "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "commit": "c0ffee" + "0" * 34,
            "stage": stage, "sources_sha256": sources_sha256(STAGES / stage),
            "processes": list(processes)}  # fmt: skip
    json_files.write(folder / f"{stage}-{backend}.json", data)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "goals.json").write_text(json.dumps(GOALS))
    return tmp_path


def table(folder, name: str = "speed") -> list[list[str]]:
    text = rendered(f"<!-- bench {name} -->\nold\n<!-- /bench -->\n", folder, folder)
    assert text.startswith(f"<!-- bench {name} -->\n") and text.endswith("\n<!-- /bench -->\n")
    text = re.sub(r"<br><small>(.*?)</small>", r" (\1)", text)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[word.strip() for word in line[2:-2].split(" | ")] for line in lines]


def row(folder, what: str) -> list[str]:
    """A bar's cells; what was reached and the verdict in one."""
    (found,) = [line for line in table(folder) if line[0].startswith(what)]
    return [*found[:3], ": ".join(filter(None, found[3:]))]


# the committed files


def test_the_tables_of_the_documents_are_those_of_the_files() -> None:
    assert render(check=True) == [], "run: fledge bench --render"


def test_every_table_is_marked_where_it_belongs() -> None:
    names = [
        found["name"]
        for name in DOCUMENTS
        for found in bench_report.BLOCK.finditer((REPO / name).read_text())
    ]
    assert names == [
        "speed", "pairs", "triton evolution 8", "triton questions", "flashinfer questions",
        "triton questions spec_v2", "triton held-out", "flashinfer held-out", "kernels", "attention",
    ]  # fmt: skip


def test_committed_results_say_where_they_come_from() -> None:
    for path in FOLDER.glob("*.json"):
        if path.name == "goals.json":
            continue
        if "-over-" in path.name:
            data = load_pairs(path)
            names = [
                side["stage"] + (f"-{side['config']}" if side["config"] else "") for side in data["sides"]
            ]
            assert path.stem.removesuffix("-idle") == "-over-".join(names) and "/tmp" not in path.read_text()
            assert {"device", "versions", "how", "command"} <= set(data) and data["cells"]
            assert len(data["commit"]) == 40 and data["dirty"] is False, f"{path}: not a clean commit"
            continue
        data = load(path)
        assert {"device", "versions", "flags", "prompt_sets", "how", "command", "sources_sha256"} <= set(data)
        assert data["processes"] and data["summary"] and "/tmp" not in path.read_text(encoding="utf-8")
        for entry in data["processes"]:
            assert len(entry["commit"]) == 40 and entry["dirty"] is False, f"{path}: not a clean commit"


def test_the_bars_are_those_that_were_asked_for() -> None:
    bars = {row["id"]: (row["must"], row["goal"], row.get("per_round")) for row in GOALS["rows"]}
    assert bars == {
        "plain_step": (0.6, 0.4, None), "verify_step": (0.75, 0.45, None), "draft_forward": (70, 40, None),
        "host_round": (100, 60, None), "plain_1": (1400, 2150, None), "plain_64": (65000, 100000, None),
        "eagle_1": (2200, 4500, 2.75), "eagle_over_plain_1": (1.5, 2.0, 2.75),
        "eagle_64": (80000, 150000, None),
        "never_slower": (1, 1, None),
    }  # fmt: skip
    assert set(bars) == set(REACHED)


def test_the_bars_of_spec_v2_are_those_that_were_asked_for() -> None:
    bars = {
        row["id"]: (row.get("must"), row.get("goal"), row["set"], row["batches"])
        for row in GOALS["pairs"]["rows"]
    }
    assert bars == {
        "idle_recovered": (0.8, None, "questions", [1, 32, 64]),
        "idle_left": (None, 0.03, "questions", [1, 32, 64]),
        "eagle_over_part4": (1, "what the idle time allows", "questions", [32]),
        "ngram_over_plain": (1.8, 3, "code-edits", [1]),
        "eagle3_over_eagle": (1.05, 1.2, "questions", [1]),
        "adaptive": ("within noise", 1, "questions", [1, 8, 32, 64, 128]),
    }


# fabricated ones


def pairs_of(folder, name: str, prompts: str, device: str = "NVIDIA H200", **cells: dict) -> None:
    """A file of pairs; a cell for each batch size, b1={quantity: (median, low, high)}."""
    sha256 = sources_sha256(STAGES / "spec_v2")
    other = {
        "stage": "spec_v2",
        "sources_sha256": sha256,
        "config": name.rpartition("-")[2],
        "algorithm": "EAGLE",
        "shape": "a shape",
    }
    found = [
        {
            "set": prompts,
            "batch": int(batch[1:]),
            "summary": {
                key: dict(zip(("median", "low", "high", "pairs"), (*value, 10)[:4], strict=True))
                for key, value in summary.items()
            },
        }
        for batch, summary in cells.items()
    ]
    data = {"format": "fledge-pairs", "version": 1, "device": device, "driver": "580.1", "cells": found,
            "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "commit": "c0ffee" + "0" * 34,
            "dirty": False, "sides": [other, other]}  # fmt: skip
    json_files.write(folder / f"{name}.json", data)


def verdict(folder, what: str) -> str:
    (found,) = [line for line in table(folder, "pairs") if line[0] == what or line[0].startswith(what + ",")]
    return ": ".join(filter(None, found[3:]))


def test_a_bar_is_reached_by_the_whole_interval(folder) -> None:
    lines = table(folder, "pairs")[2:]
    assert len(lines) == 3 + 3 + 1 + 1 + 1 + 5 and {(*line[3:],) for line in lines} == {
        ("not measured yet", "")
    }
    name = "spec_v2-ngram-over-spec_v2-plain"
    for interval, words in (
        ((2.5, 1.79, 3.2), "2.50× (1.79×–3.20×, 10 pairs): short of must"),
        ((2.5, 1.81, 3.2), "2.50× (1.81×–3.20×, 10 pairs): must reached"),
        ((3.1, 3.01, 3.2), "3.10× (3.01×–3.20×, 10 pairs): goal reached"),
        ((3.1, 3.01, 3.2, 9), "3.10× (3.01×–3.20×, 9 pairs): no verdict on fewer than 10 pairs"),
    ):
        pairs_of(folder, name, "code-edits", b1={"ratio": interval})
        assert verdict(folder, "NGRAM over plain") == words
    text = rendered("<!-- bench pairs -->\n<!-- /bench -->", folder, folder)
    assert f"[{name}.json]({name}.json): NVIDIA H200, driver 580.1, torch 2.11.0" in text
    assert "commit c0ffee0000." in text
    pairs_of(folder, name, "questions", b1={"ratio": (3, 3, 3)})  # another prompt set
    assert verdict(folder, "NGRAM over plain") == "not measured yet"
    pairs_of(folder, name, "code-edits", device="NVIDIA A100", b1={"ratio": (3, 3, 3)})
    assert verdict(folder, "NGRAM over plain") == "not measured yet"


def test_the_idle_time_has_a_share_and_a_rest(folder) -> None:
    cell = {"recovered": (0.9, 0.85, 0.95), "idle_left": (0.02, 0.01, 0.031)}
    pairs_of(folder, "spec_v2-over-part4_worker-idle", "questions", b1=cell, b32=cell | {
        "recovered": (0.9, 0.79, 0.95), "idle_left": (0.02, 0.01, 0.029)})  # fmt: skip
    share, left = "share of part4_worker's idle time in a round that overlap recovers", "idle share of spec"
    assert verdict(folder, f"{share}, batch 1") == "90.0% (85.0%–95.0%, 10 pairs): must reached"
    assert verdict(folder, f"{share}, batch 32").endswith("short of must")
    assert verdict(folder, f"{left}_v2's round, batch 1") == "2.0% (1.0%–3.1%, 10 pairs): short of goal"
    assert verdict(folder, f"{left}_v2's round, batch 32").endswith("goal reached")
    assert verdict(folder, f"{left}_v2's round, batch 64") == "not measured yet"


def test_adaptive_steps_are_held_against_the_better_of_two(folder) -> None:
    plain, chain = (f"spec_v2-adaptive-over-spec_v2-{name}" for name in ("plain", "chain"))
    pairs_of(folder, plain, "questions", b1={"ratio": (1.5, 1.4, 1.6)}, b8={"ratio": (0.9, 0.8, 0.99)})
    what = "adaptive steps over the better of plain and a fixed chain, batch"
    assert verdict(folder, f"{what} 1") == "not measured yet", "one half of it says nothing"
    pairs_of(folder, chain, "questions", b1={"ratio": (1.0, 0.98, 1.02)}, b8={"ratio": (2, 2, 2)})
    over = "over spec_v2 chain (EAGLE, a shape)"
    assert verdict(folder, f"{what} 1") == f"1.00× (0.98×–1.02×, 10 pairs {over}): must reached"
    assert verdict(folder, f"{what} 8").endswith("over spec_v2 plain (EAGLE, a shape)): short of must")


def test_nothing_is_claimed_before_it_is_measured(folder) -> None:
    assert all(line[3:] == ["not measured yet", ""] for line in table(folder)[2:])
    said = "not measured yet: `fledge bench part4_worker --attention-backend {} --set {}` on a machine"
    text = rendered("<!-- bench flashinfer questions -->\n<!-- /bench -->", folder, folder)
    assert said.format("flashinfer", "questions") in text
    measured(folder, process("plain", [cell(1, 3000.0)]))  # a file, but nothing of this set
    text = rendered("<!-- bench triton held-out -->\n<!-- /bench -->", folder, folder)
    assert said.format("triton", "held-out") in text and "|" not in text
    measured(folder, process("plain", [cell(1, 3000.0)]), device="NVIDIA A100")  # not the bars' machine
    assert row(folder, "plain, batch 1")[3] == "not measured yet"


def test_what_was_reached_against_its_bars(folder) -> None:
    measured(
        folder,
        process("plain", [cell(1, 2000.0), cell(64, 60000.0)], steady(0.0006, forward=0.00039)),
        process("chain 3/1/4", [cell(1, 3900.0, 2.0)], steady(0.7, draft=0.00013, verify=0.5)),
        process(
            "tree 3/4/8",
            [cell(1, 4000.0, 2.5)],
            steady(0.00085, draft=0.0002, verify=0.00046, draft_extend=0.0001),
        ),
        process("chain 1/1/2", [cell(64, 59000.0, 1.6)]),
    )  # fmt: skip
    text = rendered("<!-- bench speed -->\n<!-- /bench -->", folder, folder)
    assert (
        "measured at commit c0ffee0000. Each number comes from one process so far" in text
        and "(part4_worker-triton.json)" in text
    )
    name, *bars, reached = row(folder, "plain decode step")
    assert bars == ["≤ 0.60 ms", "≤ 0.40 ms"]
    assert reached == "0.39 ms (plain): goal met"
    assert row(folder, "verify step")[3] == "0.46 ms (tree 3/4/8): must met"
    assert row(folder, "one draft")[3] == "65 µs (chain 3/1/4): must met"  # two forwards make three levels
    # Of the fastest shape at batch 1.
    assert row(folder, "host time")[3] == "+90 ± 0 µs (tree 3/4/8): must met"
    assert row(folder, "plain, batch 1")[3] == "2,000 tok/s: must met (not by the slowest run, 1,000 tok/s)"
    assert row(folder, "plain, batch 64")[3] == "60,000 tok/s: short of must"
    # At 2.5 tokens per round the bars are 2.5 / 2.75 as high.
    _, *bars, reached = row(folder, "EAGLE, batch 1")
    assert bars == [
        "≥ 2,200 tok/s (at 2.75 tokens/round; here 2,000 tok/s)",
        "≥ 4,500 tok/s (at 2.75 tokens/round; here 4,091 tok/s)",
    ]
    assert reached.startswith("4,000 tok/s (tree 3/4/8, 2.50 tokens/round): must met")
    assert row(folder, "EAGLE over plain")[3] == (
        "2.00× (tree 3/4/8, 2.50 tokens/round): goal met (not by the slowest run, 1.00×)"
    )
    assert row(folder, "EAGLE, batch 64")[3].startswith(
        "59,000 tok/s (chain 1/1/2, 1.60 tokens/round): short"
    )
    assert row(folder, "EAGLE never slower")[3] == "0.98× (chain 1/1/2, questions, batch 64): short of must"


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        # Of eight rounds the last two are as long as the replays of 900 µs: the six before have fewer keys.
        ([800] * 6 + [930, 950], "+40 ± 5 µs (tree 3/4/8): goal met"),
        ([800] * 6 + [900, 1000], "+50 ± 25 µs (tree 3/4/8): must met"),  # 75 is what it may be
        ([800] * 6 + [930, 1070], "+100 ± 35 µs (tree 3/4/8): short of must"),
        ([800] * 6 + [880, 928], "below what this method resolves (+4 ± 12 µs) (tree 3/4/8): goal met"),
        ([950] * 6 + [892, 896], "below what this method resolves (−6 ± 6 µs) (tree 3/4/8): goal met"),
        ([950] * 6 + [830, 830], "below what this method resolves (−70 ± 70 µs) (tree 3/4/8): must met"),
    ],
)
def test_host_time_has_a_sign_and_a_resolution(folder, rounds, words) -> None:
    found = steady(*(us / 1e6 for us in rounds), verify=0.0009)
    measured(folder, process("tree 3/4/8", [cell(1, 4000.0, 2.5)], found))
    assert row(folder, "host time")[3] == words


def test_a_verdict_shows_the_run_that_is_below_its_bar(folder) -> None:
    measured(folder, process("plain", [cell(64, 70000.0)]), process("chain 1/1/2", [cell(64, 130000.0, 1.6)]))
    # The slowest runs have half the speed of the median.
    assert row(folder, "plain, batch 64")[3] == (
        "70,000 tok/s: must met (not by the slowest run, 35,000 tok/s)"
    )
    assert row(folder, "EAGLE, batch 64")[3].endswith("must met (not by the slowest run, 65,000 tok/s)")
    assert row(folder, "EAGLE never")[3].endswith(": goal met (not by the slowest run, 0.93×)")
    measured(folder, process("plain", [cell(64, 140000.0)]))
    assert (
        row(folder, "plain, batch 64")[3] == "140,000 tok/s: goal met (not by the slowest run, 70,000 tok/s)"
    )
    measured(folder, process("plain", [cell(1, 4400.0)]))
    assert row(folder, "plain, batch 1")[3] == "4,400 tok/s: goal met"


def test_processes_that_disagree_have_no_common_number(folder) -> None:
    twice = [process("chain 3/1/4", [cell(64, speed, 2.0)]) for speed in (88000.0, 111000.0)]
    measured(folder, process("plain", [cell(64, 70000.0)]), *twice)
    chain = next(line for line in table(folder, "triton questions") if "**chain 3/1/4**" in line)
    assert chain[2] == "**88,000 / 111,000** (44,000–138,750; processes disagree)"
    assert "processes disagree: 88,000 / 111,000 tok/s" in row(folder, "EAGLE, batch 64")[3]
    notes = bench_report.notes(load(folder / "part4_worker-triton.json"))
    assert notes == ["processes disagree: chain 3/1/4, questions, batch 64: 88,000 / 111,000"]
    closer = [process("chain 3/1/4", [cell(64, speed, 2.0)]) for speed in (90000.0, 111000.0)]
    measured(folder, *closer)
    assert "disagree" not in str(table(folder, "triton questions"))


def test_what_changed_since_is_said(folder, monkeypatch) -> None:
    """The number only where a page is built, since it changes with every commit."""
    measured(folder, process("plain", [cell(1, 402.0)]))
    data = load(folder / "part4_worker-triton.json")
    built, kept = Page(str, is_built=True), Page(str)
    for page in (built, kept):
        assert about_of(data, data["processes"], page).endswith("; measured at commit c0ffee0000.")
    data["sources_sha256"] = "0" * 64
    older = {"sources_sha256": "1" * 64, "commit": "decade" + "0" * 34, "dirty": False}
    assert about_of(data, [*data["processes"], older], kept).endswith(
        "; measured at commit c0ffee0000, decade0000 (earlier code); the code has changed since."
    )
    for count, words in ((12, "12 files of part4_worker have"), (1, "1 file of part4_worker has"),
                         (None, "the code has")):  # fmt: skip
        monkeypatch.setattr("tools.bench.tables.changed_files", lambda commit, where, count=count: count)
        assert about_of(data, [data | {"dirty": False}], built).endswith(
            f"c0ffee0000; {words} changed since."
        )
        assert about_of(data, data["processes"], kept).endswith("c0ffee0000; the code has changed since.")
    monkeypatch.setattr("tools.bench.tables.changed_files", lambda commit, where: 0)
    assert "since" not in about_of(data, data["processes"], built)  # git knows better than an older hash
    sides = [{"stage": name, "sources_sha256": "0" * 64} for name in ("spec_v2", "part4_worker")]
    said = about_of(data | {"sides": sides}, data["processes"], kept)
    assert said.count("the code has changed since") == 1


def test_a_table_names_the_commits_of_what_it_shows(folder) -> None:
    result = {"seconds": 40.0, "tokens": 2000, "requests": 8, "batch": 1}
    measured(
        folder,
        process("plain", [cell(1, 402.0)]) | {"commit": "a" * 40},
        process("plain", [cell(1, 402.0, prompts="held-out")]) | {"commit": "b" * 40},
        process("hf greedy", [], kind="hf", result=result) | {"commit": "d" * 40},
    )
    commits = {"triton questions": "ad", "triton held-out": "b", "speed": "a"}
    for name, letters in commits.items():
        text = rendered(f"<!-- bench {name} -->\n<!-- /bench -->", folder, folder)
        said = ", ".join(letter * 10 for letter in letters)
        assert f"measured at commit {said}. " in text, name


def test_the_table_of_a_prompt_set(folder) -> None:
    measured(
        folder,
        process("floor", [], kind="floor", result=FLOOR),
        process("plain", [cell(1, 402.0), cell(8, 3216.0), cell(8, 999.0, prompts="held-out")]),
        process("chain 3/1/4", [cell(1, 300.0, 2.0), cell(8, 2000.0, 2.0)]),
        process("tree 2/2/4", [cell(8, 4000.0, 2.0)]),
        process(
            "hf greedy", [], kind="hf", result={"seconds": 40.0, "tokens": 2000, "requests": 8, "batch": 1}
        ),
    )
    # A step of plain decoding takes 0.9 · 4 s / 1000 = 3.6 ms, reading its weights 2 ms.
    assert table(folder, "triton questions") == [
        ["batch", "drafts", "tokens/s", "a round", "× floor"],
        ["---", "---", "---:", "---:", "---:"],
        ["1", "plain", "402 (201–502)", "", "1.8"],
        ["1", "**chain 3/1/4**", "**300** (150–375)", "2.00", "1.4"],
        ["1", "tree 3/4/8", "not measured yet", "", ""],
        ["1", "Hugging Face `generate`, greedy", "50.0", "", ""],
        ["8", "plain", "3,216 (1,608–4,020)", "", "0.2"],
        ["8", "chain 3/1/4", "2,000 (1,000–2,500)", "2.00", "0.2"],
        ["8", "tree 3/4/8", "not measured yet", "", ""],
        ["8", "**tree 2/2/4**", "**4,000** (2,000–5,000)", "2.00", "0.1"],
    ]
    text = rendered("<!-- bench triton questions -->\n<!-- /bench -->", folder, folder)
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0; measured at commit c0ffee0000." in text
    assert table(folder, "triton held-out")[2] == ["8", "plain", "999 (499–1,249)", "", "0.7"]


def test_the_table_of_the_stages(folder, monkeypatch) -> None:
    """What a stage has and nobody measured is said, what it does not have is left out."""
    stages = [
        Stage(folder / name, {"features": {"present": has}, "run": {"speculative_algorithm": "EAGLE"}})
        for name, has in (("a", []), ("b", ["tree"]))
    ]
    monkeypatch.setattr(bench_report, "all_stages", lambda: stages)
    rows = [process("plain", [cell(8, 402.0)]), process("chain 3/1/4", [cell(8, 804.0, 2.0)])]
    measured(folder, *rows, stage="a")
    assert table(folder, "triton evolution 8")[2:] == [
        ["plain", "a", "402 (201–502)", "", ""],
        ["plain", "b", "not measured yet", "", ""],
        ["chain 3/1/4", "a", "804 (402–1,005)", "2.00", ""],
        ["chain 3/1/4", "b", "not measured yet", "", ""],
        ["tree 3/4/8", "b", "not measured yet", "", ""],
    ]
    rows = [process("plain", [cell(8, 500.0)]), process("chain 3/1/4", [cell(8, 2412.0, 2.0)])]
    measured(folder, *rows, stage="b")
    found = [line[1:3] + line[4:] for line in table(folder, "triton evolution 8")[2:]]
    # Runs of 250 to 625 and of 201 to 502 tokens/s tell nothing; those of the chain are apart.
    assert ["b", "500 (250–625)", "no difference seen"] in found
    assert ["b", "2,412 (1,206–3,015)", "3.00×"] in found
    rows = [process("chain 3/1/4", [cell(8, speed, 2.0)]) for speed in (2412.0, 4000.0)]
    measured(folder, *rows, stage="b")
    found = [line[1:3] + line[4:] for line in table(folder, "triton evolution 8")[2:]]
    assert ["b", "2,412 / 4,000 (1,206–5,000; processes disagree)", "faster"] in found


def test_the_table_of_the_kernels_sets_the_plan_in_use_beside_the_best_other(folder) -> None:
    tiles = {"way": "tiles", "block_m": 64, "block_n": 16, "warps": 4, "block_k": 128, "stages": 5}
    sliced = {"way": "sliced", "block_m": 8, "block_n": 16, "warps": 4, "block_k": 256, "stages": 1}
    few = {"way": "few_rows", "block_m": 1, "block_n": 2, "warps": 1, "block_k": 2048, "stages": 1}
    rows = [
        {"rows": 1, "library_us": 797.1, "in_use": few, "plans_us": [[192.6, few]]},
        {"rows": 64, "library_us": 849.0, "in_use": sliced, "plans_us": [[509.6, tiles], [532.4, sliced]]},
        {"rows": 1024, "library_us": 990.0, "in_use": None, "plans_us": [[1400.0, tiles]]},
    ]
    about = {"device": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2.11.0"}}
    data = about | {"commit": "c0ffee" + "0" * 34, "dirty": False, "rows": rows}
    json_files.write(folder / "kernels.json", data)
    assert table(folder / "bench", "kernels")[2:] == [
        ["1", "797 µs", "few_rows 1 × 2, 1 warp", "193 µs", "", ""],
        ["64", "849 µs", "sliced 8 × 16, 4 warps, slices of 256", "532 µs",
         "tiles 64 × 16, 4 warps, 5 stages of 128", "510 µs"],
        ["1024", "990 µs", "the library", "", "tiles 64 × 16, 4 warps, 5 stages of 128", "1400 µs"],
    ]  # fmt: skip
    assert "not measured yet" in rendered("<!-- bench attention -->\n<!-- /bench -->", folder / "bench")
    timed = [[741.5, [8, 128]], [709.6, [4, 128]]]
    data["attention"] = [{"requests": 64, "rows_each": 1, "in_use": [4, 128], "programs_us": timed}]
    json_files.write(folder / "kernels.json", data)
    head, _, *lines = table(folder / "bench", "attention")
    assert head == ["requests", "rows each", "8 warps, 128 columns", "4 warps, 128 columns"]
    assert lines == [["64", "1", "742 µs", "**710 µs**"]]


def test_the_terminal_table_has_every_cell(folder) -> None:
    measured(
        folder,
        process("plain", [cell(1, 402.0), cell(1, 100.0, prompts="held-out")]),
        process("chain 3/1/4", [cell(1, 804.0, 2.0)], steady(0.002, draft=0.0005, verify=0.001)),
        process("chain 3/1/4", [cell(1, 402.0, 2.0)], kind="tune"),
    )
    out = io.StringIO()
    Console(file=out, width=100).print(table_of(load(folder / "part4_worker-triton.json")))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["plain", "1", "402", "75%", "1.00", "1.00", "3.600", "-", "-", "10%", "-"] in lines
    assert ["chain", "3/1/4", "1", "804", "75%", "2.00", "2.00", "1.800", "1.500", "500", "10%", "-"] in lines
    assert ["chain", "3/1/4", "1", "402", "75%", "-", "2.00", "3.600", "-", "-", "10%", "-"] in lines
    assert lines.index(["held-out"]) < lines.index(["tuning"])
    assert lines.index(["questions"]) < lines.index(["held-out"]) and "…" not in out.getvalue()


def test_what_stands_beside_the_cells_is_said(folder) -> None:
    floor = FLOOR | {"layer_matmuls": {"1": [5e-4]}, "lm_head": {"1": [17e-6]}}
    measured(
        folder,
        process("floor", [], kind="floor", result=floor),
        process("hf greedy", [], kind="hf", result={"seconds": 40.0, "tokens": 2000}),
        process("tree 5/8/32", []) | {"error": "out of memory"},
        process("plain", []) | {"error": "its time was over before it had finished"},
        process("plain", [cell(1, 402.0)]),
    )
    data = load(folder / "part4_worker-triton.json") | {"tuned": {"1": "tree 5/4/8", "64": "chain 1/1/2"}}
    assert bench_report.notes(data) == [
        "floor: a copy moves 0.00 TB/s; the layers' matmuls at 1 row take 500 µs, the LM head 17 µs",
        "hf greedy, batch 1: 50.0 tokens/s",
        "best shape by batch: 1: tree 5/4/8, 64: chain 1/1/2",
        "failed: tree 5/8/32 (out of memory)",
    ]


def test_rendering_writes_only_what_changed(tmp_path, folder, monkeypatch) -> None:
    monkeypatch.setattr(bench_report, "REPO", tmp_path)
    text = "a\n<!-- bench speed -->\nold\n<!-- /bench -->\nb\n"
    (tmp_path / "A.md").write_text(text)
    (tmp_path / "B.md").write_text("no table\n")
    documents = ("A.md", "B.md")
    assert render(check=True, folder=folder, documents=documents) == ["A.md"]
    assert (tmp_path / "A.md").read_text() == text
    assert render(folder=folder, documents=documents) == ["A.md"]
    assert render(folder=folder, documents=documents) == []
    assert (tmp_path / "A.md").read_text().startswith("a\n<!-- bench speed -->\n|  | must |")
