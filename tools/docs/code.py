"""Code on a page is a stage's own, cut out by symbol: `--8<-- "code/STAGE/path.py/Class.method.md"`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from ..upstream.symbols import excerpt, find_symbol, python_symbols
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
    found = find_symbol(python_symbols(text), symbol)
    if found is None or found.kind == "name":
        raise Problem(f"A page includes {symbol}, which {where} does not define: mend the page.")
    code = textwrap.dedent(excerpt(text, found))
    return fence(code, "python", f"{where}, lines {found.first}–{found.last}")
