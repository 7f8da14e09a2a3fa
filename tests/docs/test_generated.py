"""What `fledge docs build` writes: from code, ledger and measurements, or an error that says what to mend."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from tools.bench.bench_results import load
from tools.docs import (
    build,
    charts,
    claims,
    code,
    errata,
    history,
    invariants,
    page,
    reference,
    stages,
    traces,
)
from tools.docs.page import Problem
from tools.provenance import REPO, sources_sha256
from tools.upstream.claims import Claim, expected

SMALL = {
    "docs/data/claims/a.toml": '[[claim]]\nid = "it-is"\nsays = "It is."\ngit = { commit = "815dce0554" }\n',
    "docs/data/errata.toml": '[[errata]]\nid = "e"\ntitle = "T"\nchapter = "so."\ndiffs = "not so."\n'
    'claims = ["it-is"]\n',
    "stages/part4_worker/stage.toml": "[features]\npresent = []\n",
    "stages/part4_worker/m.py": "class A:\n    @property\n    def b(self):\n        return 1\n\n\n"
    "def c():\n    return '```'\n",
}  # fmt: skip


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with as little as these tests need."""
    for name, text in SMALL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


# Code


def test_code_is_cut_out_by_symbol(repo: Path) -> None:
    assert code.fragment(repo, "part4_worker", "m.py", "A.b") == (
        '```python title="stages/part4_worker/m.py, lines 2–4"\n@property\ndef b(self):\n    return 1\n```\n'
    )
    assert code.fragment(repo, "part4_worker", "m.py", "c").startswith(
        "````python"
    )  # longer than what is inside
    (repo / "docs/p.md").write_text('--8<-- "code/part4_worker/m.py/A.md"\n--8<-- "other.md"\n')
    assert list(code.files(repo)) == ["snippets/code/part4_worker/m.py/A.md"]


@pytest.mark.parametrize(("path", "symbol"), [("m.py", "A.c"), ("m.py", "d"), ("n.py", "A")])
def test_code_that_is_gone_is_an_error(repo: Path, path: str, symbol: str) -> None:
    with pytest.raises(Problem, match=f"{symbol}.*mend the page"):
        code.fragment(repo, "part4_worker", path, symbol)


def test_code_of_a_stage_that_is_not_built_yet(repo: Path) -> None:
    assert "not built yet" in code.fragment(repo, "spec_v2", "m.py", "A")


# Claims and errata


def test_an_erratum_shows_its_claims_and_their_commands(repo: Path) -> None:
    text = errata.files(repo)["snippets/errata.md"]
    assert "[It is.](claims.md#it-is)" in text and "git log -1 815dce0554" in text
    assert "{ #it-is }" in claims.files(repo)["snippets/claims.md"]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda text: text.replace('"it-is"]', '"it-was"]'), "names the claim 'it-was'"),
        (lambda text: text.replace('["it-is"]', "[]"), "a claim at least"),
        (lambda text: text.replace('title = "T"\n', ""), "needs chapter, claims, diffs, id, title"),
        (lambda text: text + "[", "cannot be read"),
    ],
)
def test_a_spoilt_erratum_is_an_error(repo: Path, harm, sentence: str) -> None:
    path = repo / "docs/data/errata.toml"
    path.write_text(harm(path.read_text()))
    with pytest.raises(Problem, match=sentence):
        errata.files(repo)


def test_a_spoilt_claim_is_an_error(repo: Path) -> None:
    (repo / "docs/data/claims/a.toml").write_text('[[claim]]\nid = "x"\nsays = "y"\n')
    with pytest.raises(Problem, match="exactly one of git, wheel, told"):
        claims.files(repo)


def test_there_are_eighteen_disagreements() -> None:
    text = errata.files(REPO)["snippets/errata.md"]
    assert len(re.findall(r"^## \d+\. ", text, re.MULTILINE)) == 18


# The ledger


def test_the_price_is_what_the_ledger_says() -> None:
    text = history.files(REPO)["snippets/history/price.md"]
    assert re.findall(r"\| ([\d,]+) \|$", text, re.MULTILINE) == ["170", "655", "1,356"]


def test_the_chapter_s_commits_stand_in_the_order_of_their_dates() -> None:
    text = history.files(REPO)["snippets/history/twelve.md"]
    days = re.findall(r"\d{4}-\d\d-\d\d", text)
    assert len(days) == 12 and days == sorted(days) and "#2150" in text


def test_words_of_others_are_text() -> None:
    assert history.text("[Fix] a_b *c* <d>") == r"\[Fix\] a\_b \*c\* \<d\>"
    assert page.table(["a"], [["x | y"]]).endswith(r"| x \| y |")


def test_every_worker_file_has_its_life() -> None:
    text = history.files(REPO)["snippets/history/lives.md"]
    assert text.count("<rect") == text.count("<title>") > 10
    assert '<rect class="life gone"' in text and '<rect class="life alive"' in text
    assert all(0 <= float(x) <= 360 for x in re.findall(r'<rect [^>]*x="([\d.]+)"', text))


# Stages


def test_an_invariant_whose_test_is_gone_is_an_error(repo: Path) -> None:
    path = repo / "docs/data/invariants.toml"
    held = '[[invariant.held]]\nstages = ["spec_v2"]\ntests = ["tests/t.py::test_a"]\n'
    path.write_text(f'[[invariant]]\nid = "i"\nsays = "s"\n{held}')
    with pytest.raises(Problem, match="names the test tests/t.py::test_a, which does not exist"):
        invariants.read_invariants(repo)
    (repo / "tests").mkdir()
    (repo / "tests/t.py").write_text("def test_a(): pass\n")
    found = invariants.read_invariants(repo)
    assert "held by `test_a` in `tests/t.py`" in invariants.invariant_list("spec_v2", found)
    assert invariants.invariant_list("part4_worker", found) == ""


def test_a_stage_that_is_not_built_says_so_and_still_shows_upstream(tmp_path: Path) -> None:
    shutil.copytree(REPO / "docs/data", tmp_path / "docs/data")
    (tmp_path / "docs/data/invariants.toml").write_text("")
    files = stages.files(tmp_path)
    for part in ("facts", "run", "not_here", "since", "diff"):
        assert "not built yet" in files[f"snippets/stage/part4_worker/{part}.md"]
    assert "changed 6 files, +1,212 −0" in files["snippets/stage/part4_worker/touched.md"]


def test_a_stage_shows_its_diff_folded() -> None:
    text = stages.files(REPO)["snippets/stage/part4_worker/diff.md"]
    assert "speculative/build_eagle_tree.py (new)" in text and '<details class="file">' in text


# Numbers


def bench(stage: str, scale: float) -> dict:
    """A result file with one run of two configurations at two batch sizes."""
    cells = {
        name: [
            {
                "set": "questions", "batch": batch,
                "seconds": [second, 2 * second], "prefill_seconds": [0.1, 0.1],
                "requests": [8, 8], "tokens": [2048, 2048], "steps": [700, 700],
                "rounds": [0, 0] if name == "plain" else [700, 700],
            }
            for batch, second in ((1, 1.0 * factor), (8, 0.1 * factor))
        ]
        for name, factor in (("plain", 2.0 * scale), ("tree 3/4/8", 1.0 * scale))
    }  # fmt: skip
    process = {"kind": "engine", "turn": 1, "error": None, "steady": [], "commit": "c" * 40, "dirty": False}
    return {
        "format": "fledge-bench", "version": 1, "stage": stage, "device": "a GPU", "driver": "1",
        "versions": {"torch": "2", "triton": "3"}, "sources_sha256": "0" * 64, "commit": "c" * 40,
        "processes": [process | {"configuration": name, "cells": found} for name, found in cells.items()],
    }  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with result files of two stages."""
    for stage, scale in (("part3_scheduler", 2.0), ("part4_worker", 1.0)):
        (tmp_path / f"{stage}-triton.json").write_text(json.dumps(bench(stage, scale)))
        load(tmp_path / f"{stage}-triton.json")
    return tmp_path


def test_the_evolution_has_two_bars_for_each_measured_stage(measured: Path) -> None:
    text = charts.evolution(measured)
    assert text.count('class="bar plain"') == text.count('class="bar eagle"') == 2
    assert text.count('class="small" x="4"') == 3  # three stages are not measured yet
    assert (
        "| plain | part4_worker | 7,680<br><small>5,120–10,240</small> |" in text
    )  # and the same as a table
    # 2048 tokens in 0.1 s and in 0.2 s: the median and both ends.
    assert "15,360 tree 3/4/8" in text
    widths = [float(w) for w in re.findall(r'class="bar \w+" [^>]*width="([\d.]+)"', text)]
    assert max(widths) < 210  # the range reaches further than the median
    assert (
        text.count("measured at commit cccccccccc; the code has changed since.") == 1
    )  # no such commit here
    assert charts.evolution(measured / "nothing").startswith("not measured yet")


def test_a_measured_quantity_comes_from_its_row(measured: Path) -> None:
    data = {"part4_worker": charts.results(measured, "part4_worker"), "spec_v2": None}
    wanted = {"stage": "part4_worker", "configuration": "best", "batch": 1, "field": "tokens_per_second"}
    assert charts.measured(data, wanted, "x").endswith("1,536 tokens/s (1,024–2,048, 2 runs)")
    wanted["field"] = "over_plain"
    assert charts.measured(data, wanted, "x").endswith("2.00 × plain")
    wanted["field"] = "host_seconds"  # no steady rounds in this file
    assert charts.measured(data, wanted, "x").endswith("not measured yet")
    assert charts.measured(data, wanted | {"stage": "spec_v2"}, "x").endswith("not measured yet")
    with pytest.raises(Problem, match="which no result file has"):
        charts.measured(data, wanted | {"field": "beauty"}, "x")


def test_a_verification_is_compared_with_a_plain_step(measured: Path) -> None:
    """Medians over both turns of the phase that is meant, and no sentence where nothing was measured."""
    assert "not measured yet" in charts.verification(measured)
    path = measured / "part4_worker-triton.json"
    data = json.loads(path.read_text())
    steady = {"plain": {"forward": [1e-3, 2e-3, 3e-3]}, "tree 3/4/8": {"draft": [9e-3], "verify": [5e-3]}}
    for process in data["processes"]:
        phases = steady[process["configuration"]]
        process["steady"] = [{"batch": 1, "context": 9, "rounds": [1e-2], "phases": phases, "device": [1e-2]}]
    path.write_text(json.dumps(data))
    text = charts.verification(measured)
    assert "2.00 ms of the device for a plain step; 5.00 ms to verify the 8 rows" in text
    assert "of tree 3/4/8, 2.50 times" in text
    wanted = {"stage": "part4_worker", "configuration": "best", "batch": 1, "field": "verify_over_plain"}
    assert charts.measured({"part4_worker": data}, wanted, "x").endswith("2.50 × a plain step to verify")


def test_speculation_that_is_slower_than_plain_says_why(measured: Path) -> None:
    """Only where it is: the fixture's speculation is twice as fast, until its plain decoding is hurried."""
    assert charts.slower(measured, 8) == ""
    path = measured / "part3_scheduler-triton.json"
    data = json.loads(path.read_text())
    for cell in data["processes"][0]["cells"]:
        cell["seconds"] = [seconds / 5 for seconds in cell["seconds"]]
    path.write_text(json.dumps(data))
    assert charts.slower(measured, 8).startswith("Speculation is 2.5 times slower in part 3 than plain")


# Traces, reference, all together


def test_a_trace_in_words_has_a_line_for_each_step() -> None:
    path = sorted((REPO / "docs/data/traces").glob("*.json"))[0]
    trace = traces.load_trace(path)
    text = traces.in_words(path.stem, trace)
    assert text.count("| round |") == sum(
        len(step["requests"]) for step in trace["steps"] if step["kind"] == "verify"
    )
    commit = trace["provenance"]["commit"][:10]
    trace["sources_sha256"] = sources_sha256(REPO / "stages" / trace["stage"])
    assert traces.about(trace).endswith(f"; recorded at commit {commit}.")
    trace |= {"sources_sha256": "0" * 64, "provenance": trace["provenance"] | {"commit": None}}
    assert "; recorded at commit unknown; the code has changed since." in traces.in_words("x", trace)
    spoilt = copy.deepcopy(trace)
    spoilt["requests"][0]["prompt"] = "<b>`|"
    assert "&lt;b&gt;" in traces.in_words("x", spoilt)


def test_a_token_cannot_end_the_player_s_script(tmp_path: Path) -> None:
    trace = json.loads(sorted((REPO / "docs/data/traces").glob("*.json"))[0].read_text(encoding="utf-8"))
    token = next(iter(trace["pieces"]))
    trace["pieces"][token] = "</script>"
    (tmp_path / "docs/data/traces").mkdir(parents=True)
    (tmp_path / "docs/data/traces/t.json").write_text(json.dumps(trace))
    assert "</script" not in traces.files(tmp_path)["traces.js"]
    (tmp_path / "docs/data/traces/t.json").write_text("{}")
    with pytest.raises(Problem, match="not valid"):
        traces.files(tmp_path)


def test_the_reference_has_every_flag_and_every_verb() -> None:
    files = reference.files(REPO)
    assert "`speculative_num_steps`" in files["snippets/reference/flags.md"]
    commands = files["snippets/reference/commands.md"]
    assert "### fledge docs build {" in commands and "### fledge trace {" in commands
    assert str(REPO) not in commands and "\x1b" not in commands


@pytest.mark.parametrize(("link", "fails"), [("b.md#here", False), ("b.md#nowhere", True), ("c.md", True)])
def test_a_dead_link_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, fails: bool
) -> None:
    settings = (REPO / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings + "\nnav: [index.md, b.md]\n")
    shutil.copytree(REPO / "docs" / "assets", tmp_path / "docs" / "assets")
    (tmp_path / "docs/index.md").write_text(f"# a\n\n[a link]({link})\n")
    (tmp_path / "docs/b.md").write_text("# b\n\n## here\n")
    monkeypatch.setattr(build, "REPO", tmp_path)
    monkeypatch.setattr(build, "write", lambda: 0)
    if fails:
        with pytest.raises(typer.Exit):
            build.build(None)
    else:
        build.build(None)
        assert (tmp_path / "site/index.html").is_file()


def test_nothing_that_is_generated_is_committed() -> None:
    """With a clone at hand, upstream's diffs are in it."""
    done = subprocess.run(
        ["git", "ls-files", "docs/generated"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


def test_building_takes_away_what_is_no_longer_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "generated", lambda repo: {"a/b.md": "new\n"})
    old = tmp_path / "docs/generated/old.md"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert build.write(tmp_path) == 1
    assert not old.exists() and (tmp_path / "docs/generated/a/b.md").read_text() == "new\n"


def test_the_coverage_table_names_pages_that_exist() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Coverage of the chapter")[2]
    named = set(re.findall(r"`(\w[\w-]*\.md)(?:#[\w-]+)?`", text))
    assert len(named) > 10 and all((REPO / "docs" / name).is_file() for name in named)
    ids = set(re.findall(r"`(?:errata\.md)?#([\w-]+)`", text)) - {"the-price", "summary"}
    known = set(re.findall(r"\{ #([\w-]+) \}", errata.files(REPO)["snippets/errata.md"]))
    assert ids <= known and known - ids <= {"sampling"}


@pytest.mark.parametrize(
    ("proof", "what"),
    [
        ({"path": "a.py", "has": "x"}, ""),
        ({"path": "a.py", "symbol": "f", "lacks": "x"}, "prints 0"),
        ({"path": "a.py", "exists": False}, "prints nothing"),
        ({"path": "a.py", "lines": 132}, "prints 132"),
        ({"added": 1212, "removed": 0}, "lists 1,212 added, 0 removed"),
        ({"files": 6}, "lists 6 files"),
    ],
)
def test_a_command_says_what_to_expect(proof: dict, what: str) -> None:
    assert expected(Claim("p", "i", "s", "git", {"commit": "c", **proof})) == what
