"""Two directories as a reader wants to see them differ: what did not change is folded to a line.

`fold` compares by functions, not by lines: a function that stands elsewhere is a move, in its file or from
another one, and only what is not there any more or was not there before counts as removed or added.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from . import story
from .units import Unit, split

CONTEXT = 3
ALIKE, ALIKE_OF_ANOTHER_NAME = 0.6, 0.8  # shares of equal lines from which a move is one
_ORDER = ("changed", "new", "gone", "identical")


@dataclass(frozen=True)
class Part:
    """One unit of a file, or a class of which no unit changed.

    `kind` is "same", "changed", "new", "gone" or "moved". `lines` are (mark, text): " " in both, "+" and "-",
    and "…" for lines in both that are left out; a move away has none. `note` says of a move where from or to.
    """

    kind: str
    title: str
    line: int  # where it begins in the newer file; of a part that is gone, in the older
    lines: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""

    @property
    def is_folded(self) -> bool:
        """True where one line tells it all."""
        return all(mark == " " for mark, _ in self.lines)

    def count(self, mark: str) -> int:
        return sum(mark == found for found, _ in self.lines)

    def headline(self) -> str:
        """As in "def f … unchanged, 34 lines", "def f … moved to g.py" or "def f … changed, +3 −1"."""
        words = "unchanged" if self.kind == "same" else " ".join([self.kind, self.note]).strip()
        if not self.is_folded:
            words += f", +{self.count('+')} −{self.count('-')}"
        elif self.lines:
            words += f", {len(self.lines)} lines"
        return f"{self.title} … {words}"


@dataclass(frozen=True)
class FileDiff:
    """One file of either directory. `kind` is "changed", "new", "gone" or, without parts, "identical"."""

    path: str
    kind: str
    length: int  # lines of the newer file, of the older if it is gone
    parts: list[Part] = field(default_factory=list)

    @property
    def added(self) -> int:
        return sum(part.count("+") for part in self.parts)

    @property
    def removed(self) -> int:
        return sum(part.count("-") for part in self.parts)

    @property
    def folded(self) -> int:
        """Lines to read: one per part, and those of each part that is not folded."""
        return sum(1 + (0 if part.is_folded else len(part.lines)) for part in self.parts)


@dataclass(frozen=True)
class Totals:
    """The size of a diff: files by kind, and lines of all files together."""

    files: dict[str, int]
    added: int
    removed: int
    folded: int

    @classmethod
    def of(cls, diffs: list[FileDiff]) -> Totals:
        files = {kind: sum(diff.kind == kind for diff in diffs) for kind in _ORDER}
        sums = (sum(getattr(diff, name) for diff in diffs) for name in ("added", "removed", "folded"))
        return cls(files, *sums)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.files.items())
        return f"{kinds}; +{self.added} −{self.removed} lines, {self.folded} to read folded"


def fold(before: Path, after: Path) -> list[FileDiff]:
    """Every file of the two directories, by path. A stage's own stage.toml and README.md are left out."""
    trees = [_texts(before), _texts(after)]
    paths = sorted(trees[0].keys() | trees[1].keys())
    differing = [path for path in paths if trees[0].get(path) != trees[1].get(path)]
    old, new = ({path: _units(tree, path) for path in differing} for tree in trees)
    moves = _find_moves(old, new)
    diffs = []
    for path in paths:
        text = trees[1].get(path, trees[0].get(path))
        kind = "changed"
        if path not in old:
            kind = "identical"
        elif path not in trees[0]:
            kind = "new"
        elif path not in trees[1]:
            kind = "gone"
        parts = [] if kind == "identical" else _parts(path, old[path], new[path], moves)
        diffs.append(FileDiff(path, kind, len(text.splitlines()), parts))
    return diffs


def _texts(folder: Path) -> dict[str, str]:
    files = story.read_files(folder)
    return {path: files[path].decode(errors="replace") for path in files if path not in story.OWN_FILES}


def _units(tree: dict[str, str], path: str) -> dict[str, Unit]:
    return {unit.name: unit for unit in split(tree.get(path, ""), path.endswith(".py"))}


@dataclass(frozen=True)
class _Moves:
    """Units that are only gone here because they are new there, both ways, by (path, name)."""

    came_from: dict[tuple[str, str], tuple[str, Unit]]
    went_to: dict[tuple[str, str], tuple[str, Unit]]


def _find_moves(old: dict[str, dict[str, Unit]], new: dict[str, dict[str, Unit]]) -> _Moves:
    """Pair what is gone with what is new, the most alike first."""
    gone = [(p, u) for p, units in old.items() for name, u in units.items() if name not in new[p]]
    come = [(p, u) for p, units in new.items() for name, u in units.items() if name not in old[p]]
    pairs = []
    for i, (_, left) in enumerate(gone):
        for j, (_, right) in enumerate(come):
            least = ALIKE if left.last_name == right.last_name else ALIKE_OF_ANOTHER_NAME
            matcher = difflib.SequenceMatcher(None, left.lines, right.lines, autojunk=False)
            if matcher.quick_ratio() >= least and matcher.ratio() >= least:
                pairs.append((-matcher.ratio(), i, j))
    came_from, went_to = {}, {}
    for _, i, j in sorted(pairs):
        (old_path, left), (new_path, right) = gone[i], come[j]
        if (old_path, left.name) not in went_to and (new_path, right.name) not in came_from:
            went_to[old_path, left.name] = (new_path, right)
            came_from[new_path, right.name] = (old_path, left)
    return _Moves(came_from, went_to)


def _parts(path: str, old: dict[str, Unit], new: dict[str, Unit], moves: _Moves) -> list[Part]:
    """The units of one file in the newer one's order; what is gone stands where it stood.

    What has another name or class in the same file is told of once, where it is now.
    """
    order, previous = list(new), None
    for name in old:
        if name not in new:
            if moves.went_to.get((path, name), ("",))[0] == path:
                continue
            order.insert(0 if previous is None else order.index(previous) + 1, name)
        previous = name
    shared = [name for name in old if name in new]
    matcher = difflib.SequenceMatcher(None, shared, [name for name in new if name in old], autojunk=False)
    in_order = {
        shared[i] for block in matcher.get_matching_blocks() for i in range(block.a, block.a + block.size)
    }
    named = [(name, _part(path, name, old, new, moves, name in in_order)) for name in order]
    return _join_classes(named)


def _part(
    path: str, name: str, old: dict[str, Unit], new: dict[str, Unit], moves: _Moves, is_in_order: bool
) -> Part:
    left, right = old.get(name), new.get(name)
    if right is None:
        if found := moves.went_to.get((path, name)):
            return Part("moved", left.title, left.line, note=f"to {_place(path, name, *found)}")
        return Part("gone", left.title, left.line, [("-", line) for line in left.lines])
    if left is None:
        found = moves.came_from.get((path, name))
        if found is None:
            return Part("new", right.title, right.line, [("+", line) for line in right.lines])
        return Part(
            "moved",
            right.title,
            right.line,
            diff_lines(found[1], right),
            f"from {_place(path, name, *found)}",
        )
    lines = diff_lines(left, right)
    if not is_in_order:
        return Part("moved", right.title, right.line, lines, "within the file")
    return Part("same" if left.lines == right.lines else "changed", right.title, right.line, lines)


def _place(path: str, name: str, other_path: str, other: Unit) -> str:
    """Where a unit stands that moved, as far as that is not the same."""
    if other_path == path:
        return other.name
    return other_path if other.name == name else f"{other_path}:{other.name}"


def diff_lines(left: Unit, right: Unit) -> list[tuple[str, str]]:
    """The lines of two versions of a unit, marked, with those far from any change left out."""
    if left.lines == right.lines:
        return [(" ", line) for line in right.lines]
    matcher = difflib.SequenceMatcher(None, left.lines, right.lines, autojunk=False)
    lines, end = [], 0
    for group in matcher.get_grouped_opcodes(CONTEXT):
        if group[0][3] > end:
            lines.append(("…", ""))
        for tag, a, b, c, d in group:
            if tag == "equal":
                lines += [(" ", line) for line in right.lines[c:d]]
                continue
            lines += [("-", line) for line in left.lines[a:b]]
            lines += [("+", line) for line in right.lines[c:d]]
        end = group[-1][4]
    return lines + [("…", "")] * (end < len(right.lines))


def _join_classes(named: list[tuple[str, Part]]) -> list[Part]:
    """One part for a class whose every unit is the same, or came unchanged from the same place."""
    parts: list[Part] = []
    for _, group in groupby(named, key=lambda pair: pair[0].partition(".")[0]):
        mine = [part for _, part in group]
        first, is_one = mine[0], len({(part.kind, part.note) for part in mine}) == 1
        if len(mine) > 1 and is_one and all(part.is_folded for part in mine):
            lines = [line for part in mine for line in part.lines]
            mine = [Part(first.kind, first.title, first.line, lines, first.note)]
        parts += mine
    return parts
