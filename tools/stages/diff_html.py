"""A folded diff as HTML: a fragment for a page of the site, or a page of its own. Folds are <details>."""

from __future__ import annotations

from html import escape

from .fold import FileDiff, Part, Totals

STYLE = """
.fold { --add: #e6f6e6; --del: #fbe9e9; --line: #d0d0d8; --dim: #6a6a74; --move: #0b6a86; }
@media (prefers-color-scheme: dark) {
  .fold { --add: #12331a; --del: #451c20; --line: #3c3c46; --dim: #9a9aa6; --move: #6cc4e0; }
}
.fold table { border-collapse: collapse; }
.fold td, .fold th { padding: 0.1em 0.8em 0.1em 0; text-align: right; }
.fold td:first-child, .fold th:first-child, .fold td:nth-child(2), .fold th:nth-child(2) { text-align: left; }
.fold summary { cursor: pointer; }
.fold summary, .fold p.part { font-family: monospace; }
.fold .file { border-top: 1px solid var(--line); padding: 0.4em 0; }
.fold .file > summary { font-weight: bold; }
.fold .same > summary { color: var(--dim); }
.fold .moved > summary, .fold p.moved { color: var(--move); }
.fold .part { margin-left: 1em; }
.fold pre { margin: 0.2em 0 0.6em; overflow-x: auto; line-height: 1.35; }
.fold pre span { display: block; min-height: 1.35em; width: max-content; min-width: 100%; }
.fold .add { background: var(--add); }
.fold .del { background: var(--del); }
.fold .gap { color: var(--dim); }
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { font-family: sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; }
"""
_CLASSES = {"+": ' class="add"', "-": ' class="del"', "…": ' class="gap"', " ": ""}


def render_page(title: str, diffs: list[FileDiff], reasons: dict[str, str]) -> str:
    """A whole page that asks for no other file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{render_fragment(diffs, reasons)}</body></html>"
    )


def render_fragment(diffs: list[FileDiff], reasons: dict[str, str]) -> str:
    """The summary and every file that differs, to be put where STYLE is known."""
    differing = [diff for diff in diffs if diff.kind != "identical"]
    rows = "".join(_row(diff) for diff in differing)
    head = "<tr><th></th><th>file</th><th>lines</th><th>+</th><th>−</th><th>to read</th></tr>"
    files = "".join(_file(diff, reasons.get(diff.path, "")) for diff in differing)
    totals = escape(str(Totals.of(diffs)))
    return f'<div class="fold"><table>{head}\n{rows}</table>\n<p>{totals}.</p>\n{files}</div>\n'


def _row(diff: FileDiff) -> str:
    cells = (diff.kind, diff.path, diff.length, diff.added, diff.removed, diff.folded)
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>\n"


def _file(diff: FileDiff, reason: str) -> str:
    why = f"<p>{escape(reason)}</p>" if reason else ""
    parts = "".join(_part(part) for part in diff.parts)
    summary = f"{escape(diff.path)} ({diff.kind})"
    return f'<details class="file" open><summary>{summary}</summary>{why}\n{parts}</details>\n'


def _part(part: Part) -> str:
    title = escape(part.headline())
    if not part.lines:
        return f'<p class="part {part.kind}">{title}</p>\n'
    lines = "".join(f"<span{_CLASSES[mark]}>{escape(f'{mark} {line}')}</span>" for mark, line in part.lines)
    is_open = "" if part.is_folded else " open"
    return (
        f'<details class="part {part.kind}"{is_open}><summary>{title}</summary><pre>{lines}</pre></details>\n'
    )
