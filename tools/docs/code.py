"""Code on a page is a stage's own, cut out by symbol: `--8<-- "code/STAGE/path.py/Class.method.md"`."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from .page import SNIPPETS, Problem, fence, not_yet

WANTED = re.compile(r'--8<-- "code/(?P<stage>[^/"]+)/(?P<path>[^"]+\.py)/(?P<symbol>[^/"]+)\.md"')


def files(repo: Path) -> dict[str, str]:
    """A fragment for each piece of code that a page includes."""
    found: dict[str, str] = {}
    for page in sorted((repo / "docs").glob("*.md")):
        for match in WANTED.finditer(page.read_text(encoding="utf-8")):
            stage, path, symbol = match["stage"], match["path"], match["symbol"]
            name = f"{SNIPPETS}/code/{stage}/{path}/{symbol}.md"
            found[name] = fragment(repo, stage, path, symbol)
    return found


def fragment(repo: Path, stage: str, path: str, symbol: str) -> str:
    """A class, function or method as a code block; Problem where the stage has no such thing."""
    if not (repo / "stages" / stage / "stage.toml").is_file():
        return not_yet(f"The stage `{stage}` is not built yet; the code stands here as soon as it is.")
    where = f"stages/{stage}/{path}"
    try:
        text = (repo / where).read_text(encoding="utf-8")
    except OSError:
        raise Problem(f"A page includes {symbol} of {where}, which does not exist: mend the page.") from None
    node = find(ast.parse(text), symbol.split("."))
    if node is None:
        raise Problem(f"A page includes {symbol}, which {where} does not define: mend the page.")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return fence(textwrap.dedent("\n".join(lines)), "python", f"{where}, lines {first}–{node.end_lineno}")


def find(node: ast.AST, names: list[str]) -> ast.ClassDef | ast.FunctionDef | None:
    """The definition of a dotted name inside a module."""
    for child in getattr(node, "body", []):
        if (
            isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and child.name == names[0]
        ):
            return child if len(names) == 1 else find(child, names[1:])
    return None
