"""git, run so that nothing of a repository is executed and nothing of the caller's environment steers it.

A clone from somebody else may name programs (hooks, fsmonitor, external diff, textconv, gpg, ssh, remote
helpers) in its configuration, its attributes and its objects. Reading one here takes plumbing commands only,
no working tree, no network protocol at all, and settings from this file over those of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .history import MissingObject, UpstreamError, printable

# Over the repository's own values.
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.attributesFile": os.devnull,
    "core.commitGraph": "false",  # a file beside the objects that may disagree with them
    "diff.suppressBlankEmpty": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "transfer.bundleURI": "false",
    "fetch.writeCommitGraph": "false",
    "submodule.recurse": "false",
}
_FIXED = {
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_GRAFT_FILE": os.devnull,
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_LITERAL_PATHSPECS": "1",
}
# git before 2.39.4 does not know GIT_NO_LAZY_FETCH; a fetch that may use no protocol gets nowhere in any git.
_READING = {
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
}
# The reader's own proxy, certificates and keys serve when the reader asks for a download.
_NETWORK = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "https:ssh:file"}
_KEPT_FOR_NETWORK = (
    "GIT_ASKPASS GIT_CONFIG_GLOBAL GIT_CONFIG_NOSYSTEM GIT_CONFIG_SYSTEM GIT_HTTP_PROXY_AUTHMETHOD GIT_SSH "
    "GIT_SSH_COMMAND GIT_SSH_VARIANT GIT_SSL_CAINFO GIT_SSL_CAPATH GIT_SSL_CERT GIT_SSL_KEY"
).split()


class QuietGit:
    """git on one repository, through GitPython."""

    def __init__(self, git_dir: Path, network: bool = False) -> None:
        """`git_dir` is the folder with `objects` and `refs`; it must exist.

        Raises UpstreamError where git or GitPython is missing.
        """
        program = shutil.which("git")
        if program is None:
            raise UpstreamError("There is no git on this machine. On Debian: apt install git")
        # An absolute program: with a relative entry in PATH a file of the clone could be taken for git.
        self._program = os.path.abspath(program)
        self._git = git_python().cmd.Git(str(git_dir))
        self._kept = _KEPT_FOR_NETWORK if network else ()
        settings = {
            f"GIT_CONFIG_{part}_{i}": text
            for i, pair in enumerate(_SETTINGS.items())
            for part, text in zip(("KEY", "VALUE"), pair, strict=True)
        }
        # A folder that is named, and not found from within, is read whoever owns it.
        self._git.update_environment(
            GIT_DIR=str(git_dir),
            GIT_CONFIG_COUNT=str(len(_SETTINGS)),
            **settings,
            **_FIXED,
            **(_NETWORK if network else _READING),
        )

    def words(self, *words: str, stdin: bytes = b"") -> bytes:
        """Standard output of `git WORDS`. Raises MissingObject or UpstreamError with git's own sentence."""
        process = self.start(*words)
        out, err = process.proc.communicate(stdin)
        if process.proc.returncode:
            raise as_sentence(words[0], err)
        return out

    def start(self, *words: str) -> Any:
        """The running `git WORDS` as GitPython's process object, with pipes for all three streams."""
        with without_git_variables(self._kept):
            command = [self._program, "--no-pager", *words]
            return self._git.execute(command, as_process=True, istream=subprocess.PIPE)


def git_python() -> ModuleType:
    """The package `git`, imported when it is needed. Raises UpstreamError where it is not installed."""
    try:
        with without_git_variables(("GIT_PYTHON_GIT_EXECUTABLE", "GIT_PYTHON_REFRESH")):
            import git
    except ImportError as error:
        raise UpstreamError(f"GitPython cannot be used ({error}). Run: pip install GitPython") from None
    return git


@contextmanager
def without_git_variables(kept: Sequence[str] = ()) -> Iterator[None]:
    """No `GIT_…` of the caller's environment while a process starts: GitPython can add, not take away."""
    taken = {name: os.environ[name] for name in os.environ if name.startswith("GIT_") and name not in kept}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)


def as_sentence(verb: str, stderr: bytes) -> UpstreamError:
    """What git wrote before it failed, as the error that fits."""
    said = printable(stderr.decode(errors="replace")).strip()
    lines = said.splitlines() or ["nothing"]
    lacking = ("promisor remote", "missing", "unable to read", "bad object", "not allowed", "could not fetch")
    kind = MissingObject if any(words in said for words in lacking) else UpstreamError
    # The first complaint is the cause; what follows it is advice.
    return kind(f"git {verb} said: {next((line for line in lines if line.startswith('fatal:')), lines[-1])}")
