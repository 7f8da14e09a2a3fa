"""The invariants of the stages, docs/data/invariants.toml, and the list of them on a stage's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..upstream.symbols import find_symbol, python_symbols
from .page import Problem, read_toml

Invariant = dict[str, Any]


def read_invariants(repo: Path) -> list[Invariant]:
    """Each with id, says and held: which tests hold it in which stages.

    Raises Problem for a test that does not exist.
    """
    found = read_toml(repo / "docs" / "data" / "invariants.toml").get("invariant", [])
    for entry in found:
        name = entry.get("id", entry)
        if set(entry) != {"id", "says", "held"} or not entry["held"]:
            raise Problem(f"invariants.toml: {name} needs id, says and [[invariant.held]].")
        for held in entry["held"]:
            if set(held) != {"stages", "tests"} or not held["stages"] or not held["tests"]:
                raise Problem(f"invariants.toml: each `held` of {name} needs stages and tests.")
            for test in held["tests"]:
                check_test(repo, f"invariants.toml: {name}", test)
    return found


def check_test(repo: Path, who: str, test: str) -> None:
    """Raises Problem where `test`, path::name, does not exist; `who` names it."""
    path, _, name = test.partition("::")
    file = repo / path
    if not file.is_file() or find_symbol(python_symbols(file.read_text(encoding="utf-8")), name) is None:
        raise Problem(f"{who} names the test {test}, which does not exist.")


def tests_of(invariant: Invariant, stage: str) -> list[str]:
    """The tests that hold an invariant in a stage; none where it is not claimed."""
    return [test for held in invariant["held"] if stage in held["stages"] for test in held["tests"]]


def invariant_list(stage: str, invariants: list[Invariant]) -> str:
    """What must hold in a stage, and the tests that hold it there."""
    own = [(entry["says"], tests) for entry in invariants if (tests := tests_of(entry, stage))]
    return "\n".join(
        f'{number}. {says}<br><span class="held">held by '
        + ", ".join(f"`{name}` in `{path}`" for path, _, name in (test.partition("::") for test in tests))
        + "</span>"
        for number, (says, tests) in enumerate(own, 1)
    )
