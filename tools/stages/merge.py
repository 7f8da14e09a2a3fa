"""Three-way merges by `git merge-file`, and the places where one cannot be made."""

from __future__ import annotations

import difflib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..bench.stages_door import BadInput

_MARKS = ("<" * 7 + " ", "|" * 7 + " ", "=" * 7, ">" * 7 + " ")


@dataclass(frozen=True)
class Clash:
    """Lines that both sides changed. `line` is where they begin in `ours`, from 1; 0 is the whole file."""

    line: int
    text: str
    count: int = 0  # how many lines of `ours` they are


def merge(ours: bytes, base: bytes, theirs: bytes, labels: tuple[str, str, str]) -> tuple[bytes, list[Clash]]:
    """`ours` with the change from `base` to `theirs`. With clashes the content is not to be used."""
    if base in (ours, theirs):
        return (theirs if base == ours else ours), []
    if ours == theirs:
        return ours, []
    if any(b"\0" in side for side in (ours, base, theirs)):
        return ours, [Clash(0, "no text, and changed on both sides")]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, side in zip(paths, (ours, base, theirs), strict=True):
            path.write_bytes(side)
        names = [word for label in labels for word in ("-L", label)]
        done = subprocess.run(
            ["git", "merge-file", "-p", "--diff3", *names, *paths], capture_output=True, check=False
        )
    if done.returncode > 127:
        raise BadInput(f"git merge-file: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout, _clashes(done.stdout.decode(errors="replace")) if done.returncode else []


def is_settled(clash: Clash, ours: bytes, since: bytes) -> bool:
    """Whether somebody has changed the clashing lines of `ours`, of which `since` is the later version."""
    first, last = clash.line - 1, clash.line - 1 + clash.count
    matcher = difflib.SequenceMatcher(None, ours.splitlines(), since.splitlines(), autojunk=False)
    changed = [(a, b) for tag, a, b, _, _ in matcher.get_opcodes() if tag != "equal"]
    return clash.line > 0 and any(a <= last and b >= first for a, b in changed)


def _clashes(merged: str) -> list[Clash]:
    """The marked places of a merge, each with its line in `ours`."""
    clashes, line, side, start, lines = [], 1, None, 0, []
    for text in merged.splitlines():
        mark = next(
            (i for i, mark in enumerate(_MARKS) if text.startswith(mark) and (i != 2 or text == mark)), None
        )
        if mark == 0:
            side, start, lines = 0, line, []
        elif mark is not None and side is not None:
            side = mark
        elif side in (None, 0):
            line += 1
        if side is not None:
            lines.append(text)
        if mark == 3 and side is not None:
            clashes.append(Clash(start, "\n".join(lines), line - start))
            side = None
    return clashes
