"""Names and line spans of what a source file defines; the file is parsed or searched, never run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from .history import Symbol, UpstreamError


def python_symbols(text: str) -> list[Symbol]:
    """Classes, functions and methods of a Python file, and the names that a class body assigns (members of an
    enum, fields), those under `if` and `try` included; none from inside a function. A span starts with the
    first decorator.

    Raises UpstreamError for a text that this Python cannot parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stray backslash in somebody's string
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UpstreamError(f"This Python cannot parse the file ({type(error).__name__}: {error}).") from None
    return list(_defined(tree.body, ""))


def _defined(body: list[ast.stmt], outer: str) -> Iterator[Symbol]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = outer + node.name
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            is_class = isinstance(node, ast.ClassDef)
            yield Symbol(name, "class" if is_class else "def", first, node.end_lineno)
            if is_class:
                yield from _defined(node.body, f"{name}.")
        elif outer and isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield Symbol(outer + target.id, "name", node.lineno, node.end_lineno)
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, block, []), outer)
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body, outer)


def find_symbol(symbols: list[Symbol], name: str) -> Symbol | None:
    """The last symbol of that name, which is the one that counts in a running module."""
    return next((symbol for symbol in reversed(symbols) if symbol.name == name), None)


def has_name(text: str, name: str) -> bool:
    """Whether the last part of `name` is a word of a text: all that C++ and CUDA are asked for."""
    return re.search(rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)", text) is not None


def changed_lines(diff: str) -> str:
    """What a unified diff adds or removes, without the signs."""
    lines = [line for line in diff.split("\n") if line[:1] in ("+", "-") and line[:4] not in ("+++ ", "--- ")]
    return "\n".join(line[1:] for line in lines)


def excerpt(text: str, symbol: Symbol) -> str:
    """The lines of a symbol."""
    return "".join(text.splitlines(keepends=True)[symbol.first - 1 : symbol.last])
