"""What can be asked of upstream's history, whoever answers: a clone of it or the recorded ledger.

A ref is a tag, a branch, a hash of seven digits or more, a pull request ("#2150" or "2150"), or one of these
with a final "^" for its first parent. A path is upstream's, from the root of its repository.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

SPECULATIVE = "python/sglang/srt/speculative"
UPSTREAM_URL = "https://github.com/sgl-project/sglang.git"


class UpstreamError(Exception):
    """Something about upstream's history that the reader can mend; the message says how."""


class NotRecorded(UpstreamError):
    """The ledger does not have it; a clone would."""


class NoSuchRef(UpstreamError):
    """Nothing in this history has that name."""


class NoSuchFile(UpstreamError):
    """The commit has no such file."""


class MissingObject(UpstreamError):
    """It exists and is not here: an object that a clone left out, or the wheel."""


@dataclass(frozen=True)
class Change:
    """One file of a commit. Counts are lines; None for a binary file."""

    path: str
    added: int | None
    removed: int | None


@dataclass(frozen=True)
class Commit:
    """A commit; dates are ISO 8601 with the author's or the committer's own offset.

    `files` is None wherever it was not asked for; `History.commit` fills it.
    """

    hash: str
    title: str  # the subject, without "(#2150)" at its end
    pull: int | None
    author: str
    date: str  # of the author, as `git log` shows it
    committed: str
    files: tuple[Change, ...] | None = None

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def short(self) -> str:
        return self.hash[:10]

    @property
    def subject(self) -> str:
        return f"{self.title} (#{self.pull})" if self.pull else self.title

    @property
    def added(self) -> int:
        """Lines added in all files. Raises TypeError where `files` is None."""
        return sum(change.added or 0 for change in self.files)

    @property
    def removed(self) -> int:
        """Lines removed in all files. Raises TypeError where `files` is None."""
        return sum(change.removed or 0 for change in self.files)


@dataclass(frozen=True)
class Symbol:
    """A class, a function, a method ("Class.method") or a name that a class body assigns.

    Lines are counted from 1, the last one included.
    """

    name: str
    kind: str  # "class", "def" or "name"
    first: int
    last: int

    @property
    def lines(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Life:
    """One stay of a file in a folder: hashes of the commits that added and removed it.

    `became` is the new path where the removing commit renamed the file. A path that comes back has two lives.
    """

    path: str
    born: str
    died: str | None = None
    became: str | None = None


class History(ABC):
    """Upstream's history. Every method raises NoSuchRef for a ref that nothing answers to.

    The ledger raises NotRecorded where it has no record, a clone MissingObject where it lacks an object.
    """

    label: str  # "the clone in …", "the recorded ledger"
    newest: str  # the newest recorded commit of upstream's main branch, a full hash

    @abstractmethod
    def resolve(self, ref: str) -> str:
        """The full hash that `ref` stands for."""

    def note(self, ref: str) -> str | None:
        """A sentence where something else than `ref` has to stand in for it, else None."""
        return None

    @abstractmethod
    def head(self, ref: str) -> Commit:
        """One commit without its files."""

    @abstractmethod
    def commit(self, ref: str) -> Commit:
        """One commit with its files; renames are followed as `git show` does."""

    @abstractmethod
    def commits(self, path: str | None = None, until: str | None = None) -> list[Commit]:
        """The commits of main up to `until` (default: `newest`) that touch `path`, oldest first, no files."""

    @abstractmethod
    def files(self, ref: str, under: str = SPECULATIVE) -> list[str]:
        """The paths below a folder ("" for all) at a commit, sorted; empty where there is no folder."""

    @abstractmethod
    def symbols(self, ref: str, path: str) -> list[Symbol]:
        """What a Python file defines at a commit, in its order: classes, functions, methods, fields."""

    @abstractmethod
    def line_count(self, ref: str, path: str) -> int:
        """The number of lines of a file at a commit, as `wc -l` counts them."""

    @abstractmethod
    def lives(self, under: str = SPECULATIVE) -> list[Life]:
        """Births and deaths of the files below a folder, up to `newest`, in order of birth."""

    @abstractmethod
    def occurrences(self, word: str, ref: str, path: str | None = None, symbol: str | None = None) -> int:
        """How often a word stands in a file at a commit, or in one definition of the file; without a path, in
        the lines that the commit adds or removes. 0 where there is no such file or definition."""

    @abstractmethod
    def text(self, ref: str, path: str) -> str:
        """A file's text at a commit. Clones only."""

    @abstractmethod
    def diff(self, ref: str, path: str | None = None) -> str:
        """What a commit changed, as a unified diff. Clones only."""


def workers(paths: list[str]) -> list[str]:
    """Those Python files of a list that have "_worker" in their name, as in the chapter's second listing."""
    return [path for path in paths if path.endswith(".py") and "_worker" in path.rpartition("/")[2]]


def pull_of(subject: str) -> tuple[str, int | None]:
    """Title and pull request of a subject "Title (#2150)"."""
    found = re.fullmatch(r"(.*?)\s*\(#(\d+)\)\s*", subject, re.DOTALL)
    return (found[1], int(found[2])) if found else (subject.strip(), None)


def as_pull(ref: str) -> int | None:
    """The number in "#2150" or "2150"; None for any other ref."""
    found = re.fullmatch(r"#?([0-9]{1,6})", ref)
    return int(found[1]) if found else None


def is_hash(ref: str) -> bool:
    """Whether `ref` is a hash or a beginning of one that is long enough."""
    return re.fullmatch(r"[0-9a-f]{7,40}", ref) is not None and as_pull(ref) is None


def check_ref(ref: str) -> str:
    """`ref`, if it is one that the module's docstring allows. Raises NoSuchRef else.

    What git would read as an option, a range or an expression never reaches it.
    """
    if re.fullmatch(r"(#[0-9]{1,6}|[0-9A-Za-z][0-9A-Za-z._/+-]{0,199})\^?", ref) and ".." not in ref:
        return ref
    raise NoSuchRef(
        f"{printable(ref)!r} is no ref: give a tag, a branch, a hash or a pull request like #2150."
    )


def check_path(path: str) -> str:
    """`path`, if it is one from the root of a repository. Raises UpstreamError else."""
    if path and not path.startswith(("/", "-", ":")) and path.isprintable() and ".." not in path.split("/"):
        return path.rstrip("/")
    raise UpstreamError(
        f"{printable(path)!r} is no path of a repository: "
        f"give one from its root, like {SPECULATIVE}/spec_info.py."
    )


def printable(text: str) -> str:
    """`text` with control characters but newline and tab written out: a title may hold an escape code."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
