"""A Python file as the pieces a reader thinks in: its functions, its classes, and the code between them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Unit:
    """One function with the comments above it, a class without its methods, or all code outside of both.

    `name` is "Class.method", "Class", "function", or "" for the module's own code. `lines` has neither blank
    lines around it nor indentation that all of it shares; `line` is where it begins, from 1.
    """

    kind: str  # "module", "class", "def", or "file" for what is not Python
    name: str
    line: int
    lines: tuple[str, ...]

    @property
    def title(self) -> str:
        if self.kind in ("def", "class"):
            return f"{self.kind} {self.name}"
        return {"module": "module level", "file": "the file"}[self.kind]

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]


def split(source: str, is_python: bool) -> list[Unit]:
    """The units of a file in the order of their first lines; every line that is not blank is in one.

    What stands twice under one name (a property and its setter) is one unit. A file that cannot be parsed is
    one unit as a whole, and so is one that is not Python.
    """
    lines = source.splitlines()
    owners = [("file", "")] * len(lines)
    if is_python:
        try:
            body = ast.parse(source).body
        except SyntaxError:
            pass
        else:
            owners = [("module", "")] * len(lines)
            _mark(body, "", lines, owners, 0)
    numbers: dict[str, list[int]] = {}
    for number, (_, name) in enumerate(owners):
        numbers.setdefault(name, []).append(number)
    units = [_unit(owners[mine[0]][0], name, lines, mine) for name, mine in numbers.items()]
    return [unit for unit in units if unit.lines]


def _mark(
    body: list[ast.stmt], prefix: str, lines: list[str], owners: list[tuple[str, str]], top: int
) -> None:
    """Write into `owners` which unit each line of `body` belongs to; `top` is the first line that may."""
    for node in body:
        if isinstance(node, (*_DEFS, ast.ClassDef)):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            while start > top and (not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#")):
                start -= 1
            kind = "class" if isinstance(node, ast.ClassDef) else "def"
            name = prefix + node.name
            owners[start : node.end_lineno] = [(kind, name)] * (node.end_lineno - start)
            if kind == "class":
                _mark(node.body, f"{name}.", lines, owners, node.lineno)
        top = node.end_lineno


def _unit(kind: str, name: str, lines: list[str], numbers: list[int]) -> Unit:
    while numbers and not lines[numbers[0]].strip():
        numbers = numbers[1:]
    while numbers and not lines[numbers[-1]].strip():
        numbers = numbers[:-1]
    mine = [lines[number] for number in numbers]
    margin = min((len(line) - len(line.lstrip()) for line in mine if line.strip()), default=0)
    first = numbers[0] + 1 if numbers else 0
    return Unit(kind, name, first, tuple(line[margin:] for line in mine))
