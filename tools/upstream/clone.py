"""`CloneHistory`: upstream's history from a clone, mirror or fork on this machine, which is only read."""

from __future__ import annotations

import functools
from pathlib import Path

from .history import (
    SPECULATIVE,
    UPSTREAM_URL,
    Change,
    Commit,
    History,
    Life,
    MissingObject,
    NoSuchFile,
    NoSuchRef,
    Symbol,
    UpstreamError,
    as_pull,
    check_path,
    check_ref,
    is_hash,
    pull_of,
)
from .ledger import LedgerHistory
from .quiet_git import QuietGit, git_python, without_git_variables
from .symbols import changed_lines, excerpt, find_symbol, python_symbols

_SHOW = ["--encoding=UTF-8", "--no-commit-header", "--format=%H%x00%P%x00%an%x00%aI%x00%cI%x00%s"]
# diff-tree, unlike diff and log, takes no algorithm, context, colour or prefix from a configuration.
_DIFF = ["-r", "--no-ext-diff", "--no-textconv", "-l1000"]
_MAINS = ("refs/remotes/upstream/main", "refs/remotes/origin/main", "refs/heads/main")


class CloneHistory(History):
    """Reads `path`, a bare repository or a working clone. HEAD is never asked: a fork's is the fork's own."""

    def __init__(self, path: Path, ledger: LedgerHistory | None = None, is_ours: bool = False) -> None:
        """The ledger gives pull requests and `newest`; `is_ours` says that `fledge upstream fetch` made it.

        Raises UpstreamError where there is no repository.
        """
        self.path = Path(path)
        self.label = f"the clone in {self.path}"
        self.git = QuietGit(git_dir_of(self.path))
        self.ledger = ledger
        self.is_ours = is_ours

    @functools.cached_property
    def newest(self) -> str:
        if self.ledger and self.has_commit(self.ledger.newest):
            return self.ledger.newest
        return self.resolve("main")

    @property
    def is_shallow(self) -> bool:
        return self.git.words("rev-parse", "--is-shallow-repository").strip() == b"true"

    def has_commit(self, full: str) -> bool:
        """Whether the clone holds the commit with this full hash."""
        return full in self._commits_with_prefix(full)

    def holds_on_main(self, full: str) -> str:
        """`full`, if it is a commit of upstream's main branch here. Raises NoSuchRef else."""
        if full not in {commit.hash for commit in self._walk(self.resolve("main"))}:
            raise NoSuchRef(f"{full[:10]} is not on main in {self.label}.")
        return full

    # Refs

    def resolve(self, ref: str) -> str:
        if check_ref(ref).endswith("^"):
            parents = self._header(self.resolve(ref[:-1]))[1].split()
            if not parents:
                raise NoSuchRef(f"{ref[:-1]} has no parent here.")
            return parents[0]
        found = self._resolve(ref)
        if found is None and self.ledger and self.ledger.is_baseline(ref):
            return self.newest
        if found is None:
            known = f" The ledger knows it as {full}." if (full := self._recorded(ref)) else ""
            raise NoSuchRef(
                f"{self.label.capitalize()} has no {ref}.{known} "
                "Newer commits come with: fledge upstream fetch"
            )
        return found

    def note(self, ref: str) -> str | None:
        if self.ledger and self.ledger.is_baseline(ref) and self._resolve(ref) is None:
            return self.ledger.stand_in_note(ref)
        return None

    def _resolve(self, ref: str) -> str | None:
        if (pull := as_pull(ref)) is not None:
            recorded = self._recorded(ref)
            return recorded if recorded and self.has_commit(recorded) else self._pulls.get(pull)
        if is_hash(ref):
            found = self._commits_with_prefix(ref)
            if len(found) > 1:
                raise NoSuchRef(f"{ref} begins {len(found)} commits: give more digits.")
            if found:
                return found[0]
        if ref == "main":
            return self._main
        return next(
            (full for name in ("refs/tags/", "refs/heads/") if (full := self._ref(name + ref)) is not None),
            None,
        )

    def _recorded(self, ref: str) -> str | None:
        return self.ledger.find(ref) if self.ledger else None

    @functools.cache  # noqa: B019, it lives as long as its command
    def _commits_with_prefix(self, prefix: str) -> list[str]:
        """By object and not by name, so that a branch called like a hash is never taken for it."""
        lines = self.git.words("rev-parse", f"--disambiguate={prefix}").split()
        if not lines:
            return []
        kinds = self.git.words("cat-file", "--batch-check", stdin=b"\n".join(lines) + b"\n").splitlines()
        return [line.split()[0].decode() for line in kinds if line.split()[1] == b"commit"]

    def _ref(self, full_name: str) -> str | None:
        words = ("--verify", "--quiet", "--end-of-options", full_name + "^{commit}")
        try:
            return self.git.words("rev-parse", *words).strip().decode()
        except UpstreamError:
            return None

    @functools.cached_property
    def _main(self) -> str | None:
        """Upstream's main branch as this clone knows it: the first that contains what the ledger recorded."""
        found = [full for name in _MAINS if (full := self._ref(name)) is not None]
        for full in found:
            if (
                self.ledger
                and self.ledger.newest in self.git.words("rev-list", "--first-parent", full).decode()
            ):
                return full
        return found[0] if found else None

    @functools.cached_property
    def _pulls(self) -> dict[int, str]:
        """Pull request → commit of main; the newest where a number stands twice."""
        if self._main is None:
            return {}
        return {commit.pull: commit.hash for commit in self._walk(self._main) if commit.pull is not None}

    # Facts

    def head(self, ref: str) -> Commit:
        return _commit(self._header(self.resolve(ref)))

    def commit(self, ref: str) -> Commit:
        full = self.resolve(ref)
        return _commit(self._header(full), self._changes(full))

    def commits(self, path: str | None = None, until: str | None = None) -> list[Commit]:
        end = self.newest if until is None else self.resolve(until)
        only = ["--", check_path(path)] if path else []
        return self._walk(end, *only)

    def files(self, ref: str, under: str = SPECULATIVE) -> list[str]:
        only = ["--", check_path(under)] if under else []
        said = self._said("ls-tree", "-r", "-z", "--name-only", "--full-tree", self.resolve(ref), *only)
        return sorted(said.rstrip("\0").split("\0")) if said else []

    def symbols(self, ref: str, path: str) -> list[Symbol]:
        if not path.endswith(".py"):
            raise UpstreamError(f"{path} is no Python file: its symbols can be searched for, not listed.")
        return python_symbols(self.text(ref, path))

    def line_count(self, ref: str, path: str) -> int:
        return self.text(ref, path).count("\n")

    def occurrences(self, word: str, ref: str, path: str | None = None, symbol: str | None = None) -> int:
        if path is None:
            return changed_lines(self.diff(ref)).count(word)
        try:
            text = self.text(ref, path)
        except NoSuchFile:
            return 0
        if symbol is not None:
            found = find_symbol(python_symbols(text), symbol)
            text = excerpt(text, found) if found else ""
        return text.count(word)

    def text(self, ref: str, path: str) -> str:
        oid = self.blob(ref, path)
        if oid is None:
            raise NoSuchFile(f"There is no file {path} at {ref}.")
        try:
            return self._said("cat-file", "blob", oid)
        except UpstreamError as error:
            raise self._missing(f"{path} at {ref}", ref, error) from None

    def blob(self, ref: str, path: str) -> str | None:
        """The hash of a file's content at a commit; None where there is no such file."""
        said = self._said("ls-tree", "-z", "--full-tree", self.resolve(ref), "--", check_path(path))
        if not said:
            return None
        _, kind, oid = said.partition("\t")[0].split()
        return oid if kind == "blob" else None

    def blobs(self, ref: str, under: str) -> dict[str, str]:
        """Path → hash of the content of every file below a folder at a commit."""
        said = self._said("ls-tree", "-r", "-z", "--full-tree", self.resolve(ref), "--", check_path(under))
        entries = [entry.partition("\t") for entry in said.split("\0") if entry]
        return {path: about.split()[2] for about, _, path in entries if about.split()[1] == "blob"}

    def changed_blobs(self, ref: str, under: str | None = None) -> set[str]:
        """The hashes of all file contents on either side of a commit's diff; needs none of them."""
        only = ["--", under] if under else []
        said = self._diff_tree(self.resolve(ref), ["--raw", "--no-abbrev", "-z"], only)
        entries = [entry.split() for entry in said.split("\0") if entry.startswith(":")]
        is_file = [(entry[:2], entry[2:4]) for entry in entries]
        pairs = [pair for modes, oids in is_file for pair in zip(modes, oids, strict=True)]
        return {
            oid for mode, oid in pairs if mode.lstrip(":").startswith(("100", "120")) and set(oid) != {"0"}
        }

    def present(self) -> set[str]:
        """The hash of every object that the clone holds."""
        words = ("--batch-all-objects", "--unordered", "--batch-check=%(objectname)")
        return set(self._said("cat-file", *words).split())

    def diff(self, ref: str, path: str | None = None) -> str:
        only = ["--", check_path(path)] if path else []
        return self._diff_tree(self.resolve(ref), ["-p", "-M"], only)

    @functools.cache  # noqa: B019, it lives as long as its command
    def lives(self, under: str = SPECULATIVE) -> list[Life]:
        hashes = "".join(commit.hash + "\n" for commit in self.commits(under))
        words = [
            "diff-tree",
            "--stdin",
            "--root",
            *_DIFF,
            "--diff-filter=AD",
            "--name-status",
            "-z",
        ]
        said = self.git.words(*words, "--", under, stdin=hashes.encode()).decode(errors="surrogateescape")
        lives: list[Life] = []
        fields, commit = iter(said.rstrip("\0").split("\0") if said else []), ""
        for field in fields:
            if len(field) == 40:
                commit = field
            elif field == "A":
                lives.append(Life(next(fields), commit))
            else:
                path = next(fields)
                [i] = [i for i, life in enumerate(lives) if life.path == path and life.died is None]
                lives[i] = Life(path, lives[i].born, commit, self._renames(commit, under).get(path))
        return lives

    @functools.cache  # noqa: B019, it lives as long as its command
    def _renames(self, full: str, under: str) -> dict[str, str]:
        words = ["-M", "--diff-filter=R", "--name-status", "-z"]
        said = self._diff_tree(full, words, ["--", under])
        fields = said.rstrip("\0").split("\0") if said else []
        return dict(zip(fields[1::3], fields[2::3], strict=True))

    def _changes(self, full: str) -> tuple[Change, ...]:
        fields = iter(self._diff_tree(full, ["-M", "--numstat", "-z"], []).split("\0"))
        changes = []
        for field in fields:
            if not field:
                continue
            added, removed, path = field.split("\t", 2)
            if not path:  # a rename: the old and the new path follow
                next(fields)
                path = next(fields)
            changes.append(
                Change(path, *(None if count == "-" else int(count) for count in (added, removed)))
            )
        return tuple(sorted(changes, key=lambda change: change.path))

    def _diff_tree(self, full: str, how: list[str], only: list[str]) -> str:
        parents = self._header(full)[1].split()
        pair = [parents[0], full] if parents else ["--root", "--no-commit-id", full]
        try:
            return self._said("diff-tree", *_DIFF, *how, *pair, *only)
        except MissingObject as error:
            raise self._missing(f"what {full[:10]} changed", full[:10], error) from None

    # What git says

    @functools.cache  # noqa: B019, it lives as long as its command
    def _header(self, full: str) -> list[str]:
        words = ["rev-list", "--max-count=1", *_SHOW, full]
        return self._said(*words).rstrip("\n").split("\0")

    def _walk(self, end: str, *only: str) -> list[Commit]:
        words = ["rev-list", "--first-parent", "--reverse", *_SHOW, end]
        return [_commit(line.split("\0")) for line in self._said(*words, *only).split("\n") if line]

    def _said(self, *words: str) -> str:
        return self.git.words(*words).decode(errors="surrogateescape")

    def _missing(self, what: str, ref: str, error: UpstreamError) -> MissingObject:
        remote = (self._remotes() or [UPSTREAM_URL.removesuffix(".git")])[0]
        mend = "Run: fledge upstream fetch"
        mend = f"{mend} {ref}" if self.is_ours else f"Fetch it there with git, or use a clone of ours. {mend}"
        return MissingObject(
            f"{self.label.capitalize()} does not hold {what}; {remote} has it. {mend}  ({error})"
        )

    def _remotes(self) -> list[str]:
        """The clone's remotes with their addresses, without credentials."""
        try:
            said = self._said("config", "--local", "--get-regexp", r"^remote\..*\.url$")
        except UpstreamError:
            return []
        pairs = [line.split(" ", 1) for line in said.splitlines() if " " in line]
        return [f"its remote {key[len('remote.') : -len('.url')]} ({_no_secret(url)})" for key, url in pairs]


def git_dir_of(path: Path) -> Path:
    """The folder with a repository's objects, for a bare repository, a clone or a linked working tree.

    Raises UpstreamError where `path` is none of these.
    """
    git = git_python()
    try:
        with without_git_variables(), git.Repo(path, expand_vars=False) as repo:
            return Path(repo.common_dir).resolve()
    except (git.exc.InvalidGitRepositoryError, git.exc.NoSuchPathError):
        raise UpstreamError(f"There is no git repository in {path}.") from None


def _no_secret(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if mark else url


def _commit(fields: list[str], files: tuple[Change, ...] | None = None) -> Commit:
    full, _, author, date, committed, subject = fields
    title, pull = pull_of(subject)
    return Commit(full, title, pull, author, date, committed, files)
