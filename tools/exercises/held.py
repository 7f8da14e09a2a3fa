"""Whether the tests that an invariant names for a stage can be run for that stage: pytest is asked."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from ..docs.invariants import Invariant
from ..stages.mutants import run_pytest
from ..stages.story import ORDER

COLLECTED = re.compile(r"^(tests/[^\s\[]+)(?:\[(.*)\])?$", re.MULTILINE)


def not_run(repo: Path, invariants: list[Invariant]) -> list[str]:
    """A sentence for each stage and test that do not go together."""
    wanted = {
        (test, stage): entry["id"]
        for entry in invariants
        for held in entry["held"]
        for test in held["tests"]
        for stage in held["stages"]
    }
    runs = stages_of(repo, sorted({test for test, _ in wanted}))
    return [
        f"invariants.toml: {name} has {test} for {stage}, for which pytest cannot run it."
        for (test, stage), name in wanted.items()
        if stage not in runs[test]
    ]


def stages_of(repo: Path, tests: list[str]) -> dict[str, set[str]]:
    """Test → the stages it is run for: those its cases name, else those that its file imports."""
    words = ["--collect-only", "-q", *tests, *(f"--stage={stage}" for stage in ORDER)]
    _, output = run_pytest(repo, words, ORDER[-1])
    found: defaultdict[str, set[str]] = defaultdict(set)
    for test, case in COLLECTED.findall(output):
        named = {stage for stage in ORDER if stage in case}
        found[test] |= named or imported(repo / test.partition("::")[0])
    return found


def imported(path: Path) -> set[str]:
    """The stages that a file of tests imports, and the one whose folder it stands in."""
    text = path.read_text(encoding="utf-8")
    return {*re.findall(r"^\s*(?:from|import) stages\.(\w+)", text, re.MULTILINE), path.parent.name}
