"""cases.toml is whole: every id is answered for, no id is unknown, every node it names is a
test that exists.
"""

from __future__ import annotations

import ast
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

from tests.contract.harness import REPO
from tests.contract.subset import LEFT_OUT

HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "cases.toml").read_text())


def problems(table: dict, exists) -> list[str]:
    """What is wrong with a table of cases; `exists(node)` says whether a test is there."""
    found, ids, cases = [], table["ids"], table["cases"]
    found += [f"{case} is listed twice" for case in {c for c in ids if ids.count(c) > 1}]
    found += [f"{case} has no entry" for case in ids if case not in cases]
    found += [f"{case} is no id" for case in cases if case not in ids]
    for case, entry in cases.items():
        if unknown := entry.keys() - {"feature", "tests", "refused", "reason"}:
            found.append(f"{case} has the unknown keys {sorted(unknown)}")
        if not (entry.get("tests") or entry.get("refused") or entry.get("reason")):
            found.append(f"{case} is answered by nothing")
        if "refused" in entry and "feature" not in entry:
            found.append(f"{case} is refused for no feature")
        for node in [*entry.get("tests", []), *entry.get("refused", [])]:
            if not exists(node):
                found.append(f"{case} names {node}, which does not exist")
    return found


@lru_cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the test functions of a file; none where there is no such file."""
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return frozenset(i.name for i in body if isinstance(i, ast.FunctionDef) and i.name.startswith("test_"))


def node_exists(node: str) -> bool:
    file, _, name = node.partition("::")
    return name in names_in(REPO / file if "/" in file else HERE / file)


def test_every_case_is_answered():
    assert problems(TABLE, node_exists) == []
    assert len(TABLE["ids"]) == 91


def test_this_stage_answers_every_case(stage):
    """A case about a feature needs tests where the stage has it and the test of its refusal where it lacks
    it.
    """
    open_cases = []
    for case, entry in TABLE["cases"].items():
        feature = entry.get("feature")
        if feature is not None:
            assert feature in stage.present | stage.missing.keys(), f"{case}: {feature} is no feature"
            wanted = "tests" if stage.has(feature) else "refused"
            if not entry.get(wanted):
                open_cases.append(f"{case} has no {wanted}, and {stage.name} needs them ({feature})")
    assert open_cases == []


def test_what_is_left_out_exists():
    assert [node for node in LEFT_OUT if not node_exists(node)] == []


@pytest.mark.parametrize(
    "spoil, word",
    [
        (lambda t: t["ids"].append("B999"), "B999 has no entry"),
        (
            lambda t: t["cases"].update(B998={"tests": ["test_cases.py::test_every_case_is_answered"]}),
            "B998 is no id",
        ),
        (lambda t: t["cases"]["B01"].update(tests=["test_cases.py::test_gone"]), "does not exist"),
        (
            lambda t: t["cases"]["B01"].update(tests=["test_gone.py::test_every_case_is_answered"]),
            "does not exist",
        ),
        (lambda t: t["cases"]["B01"].update(tests=[]), "answered by nothing"),
        (lambda t: t["cases"].pop("B02"), "B02 has no entry"),
        (lambda t: t["ids"].append("B01"), "twice"),
        (lambda t: t["cases"]["B01"].update(test=[]), "unknown keys"),
    ],
)
def test_a_spoilt_table_is_noticed(spoil, word):
    table = tomllib.loads((HERE / "cases.toml").read_text())
    spoil(table)
    assert any(word in problem for problem in problems(table, node_exists))
