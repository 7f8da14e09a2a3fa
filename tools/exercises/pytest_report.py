"""A pytest plugin: what a failing test expected, what it got and where, as JSON lines in the file of --red.

Loaded by `fledge exercise check` alone. In `assert a == b`, as the tests here are written, a is what came.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from _pytest._io.saferepr import saferepr

_SHOWN = 300  # characters of a value
_compared: list[tuple[Any, str, Any]] = []
_file: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--red", required=True, help="where to write what failed")


def pytest_configure(config: pytest.Config) -> None:
    _file[:] = [config.getoption("--red")]


def pytest_assertrepr_compare(op: str, left: Any, right: Any) -> None:
    _compared.append((left, op, right))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.failed and call.excinfo is not None:
        _write(item.nodeid, _first_paragraph(inspect.getdoc(getattr(item, "obj", None))), call.excinfo)
    _compared.clear()
    return report


def pytest_exception_interact(node: pytest.Collector, call: pytest.CallInfo) -> None:
    if isinstance(node, pytest.Collector):  # a module that cannot be imported, the stage's error in it
        cause = call.excinfo.value.__cause__ or call.excinfo.value
        _write(node.nodeid, "", pytest.ExceptionInfo.from_exception(cause))


def _write(test: str, holds: str, error: pytest.ExceptionInfo) -> None:
    frames = [entry for entry in error.traceback.filter(error) if _inside(entry.path)]
    in_test = [entry for entry in frames if _inside(entry.path).startswith("tests/")]
    told = {"test": test, "holds": holds, "where": [_place(entry) for entry in frames[-1:]]}
    if in_test and in_test[-1] is not frames[-1]:
        told["where"].insert(0, _place(in_test[-1]))
    statement = " ".join(str(in_test[-1].statement).split()) if in_test else ""
    if error.errisinstance(AssertionError) and _compared:
        left, op, right = _compared[-1]
        told |= {"expected": ("" if op == "==" else op + " ") + _short(right), "got": _short(left)}
        told["first"] = _first_difference(left, right) if op == "==" else ""
    else:
        lines = "; ".join(line.strip() for line in str(error.value).splitlines() if line.strip())[:_SHOWN]
        if error.errisinstance(AssertionError):
            told |= {"expected": _asserted(statement), "got": lines or "it does not hold"}
            statement = ""
        else:
            told |= {"expected": "no exception", "got": f"{error.typename}: {lines}"}
    if isinstance(error.value, SyntaxError) and error.value.filename:
        told["where"] = [f"{_inside(Path(error.value.filename))}:{error.value.lineno}"]
    told["line"] = statement
    with open(_file[0], "a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")


def _asserted(statement: str) -> str:
    """What an assert statement asserts, without its message."""
    try:
        return ast.unparse(ast.parse(statement).body[0].test)
    except (SyntaxError, AttributeError, IndexError):
        return statement


def _inside(path: Path | str) -> str:
    """A path from the root of the copy; "" for one outside, such as a library's."""
    try:
        found = Path(path).resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return ""
    return found if found.startswith(("stages/", "tests/")) else ""


def _place(entry: Any) -> str:
    return f"{_inside(entry.path)}:{entry.lineno + 1}, in {entry.name}"


def _first_difference(left: Any, right: Any) -> str:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        for i, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                deeper = _first_difference(a, b)
                return (
                    f"[{i}]{deeper}"
                    if deeper.startswith("[")
                    else f"[{i}]: got {_short(a)}, expected {_short(b)}"
                )
        if len(left) != len(right):
            return f"got {len(left)} items, expected {len(right)}"
    return ""


def _short(value: Any) -> str:
    return saferepr(value, maxsize=_SHOWN)


def _first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "").partition("\n\n")[0].split())
