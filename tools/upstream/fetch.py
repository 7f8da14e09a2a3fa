"""`fledge upstream fetch`: a clone of upstream without file contents, then the contents that the site names.

The clone has every commit and every tree and no blob (`--filter=blob:none`). It comes in steps, up to one tag
after another, and a finished step is kept, so that an interrupted download goes on where it was. What the
ledger, the source maps and the claims name is then asked for at once, in one fetch; nothing is ever fetched
by the way.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ..models.cache import sha256_of
from .clone import CloneHistory, git_dir_of
from .history import UPSTREAM_URL, NoSuchRef, UpstreamError
from .ledger import LedgerHistory
from .named import Named
from .quiet_git import QuietGit, as_sentence, git_python
from .source import remember, remembered, upstream_root
from .wheel import Wheel

Say = Callable[[str], None]
Watch = Callable[[str, float | None], None]  # what git is doing, and the share of it that is done

_NO_MORE = ("--no-tags", "--no-write-fetch-head", "--recurse-submodules=no", "--filter=blob:none")


def fetch_clone(
    source: str | None, more: Iterable[str], named: Named, ledger: LedgerHistory, say: Say, watch: Watch
) -> CloneHistory:
    """The clone that is used from now on: `source` itself if it is a path, else a partial clone of it.

    `more` are refs whose contents are fetched too. Raises UpstreamError, and keeps what has been downloaded.
    """
    if source is not None and not _is_address(source):
        if more:
            raise UpstreamError("A clone of yours is only read: fetch what it lacks with git, in that clone.")
        history = CloneHistory(Path(source).expanduser().resolve(), ledger)
        say(f"{history.label.capitalize()} is read in place, and nothing is written to it.")
    else:
        url = source or _address_in_use() or UPSTREAM_URL
        history = CloneHistory(_partial_clone(url, named, say, watch), ledger, is_ours=True)
        _fetch_blobs(history, wanted_blobs(history, named, ledger, more), say, watch)
    lacking = set(ledger.table["commits"]) - history.present()
    total = len(ledger.table["commits"])
    if len(lacking) == total:
        raise UpstreamError(
            f"{history.label.capitalize()} has none of the {total} commits that the ledger names."
        )
    say(f"It has {total - len(lacking)} of the {total} commits that the ledger names.")
    remember("clone", history.path)
    return history


def _is_address(source: str) -> bool:
    if re.match(r"(https|ssh|file)://|\w[\w.-]*@[\w.-]+:", source):
        return True
    if "://" in source or "::" in source or source.startswith("-"):
        raise UpstreamError(
            f"{source!r} is no address to fetch from: https, ssh and file are, and a folder is."
        )
    return False


def _address_in_use() -> str | None:
    """Where the clone in use came from, if it is one of ours."""
    path = remembered("clone")
    if path is None or path.parent != upstream_root().resolve() or not path.is_dir():
        return None
    return QuietGit(path).words("config", "--local", "remote.origin.url").decode().strip()


def _partial_clone(url: str, named: Named, say: Say, watch: Watch) -> Path:
    name = "sglang" if url == UPSTREAM_URL else "from-" + hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = upstream_root() / f"{name}.git"
    folder.mkdir(parents=True, exist_ok=True)
    git = QuietGit(folder, network=True)
    if not (folder / "HEAD").exists():
        git.words("init", "--quiet", "--bare", "--template=", "--initial-branch=main")
    for key, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", url),
        ("remote.origin.promisor", "true"),
        ("remote.origin.partialCloneFilter", "blob:none"),
    ):
        git.words("config", "--local", key, value)
    there = (
        git.words("ls-remote", "--quiet", "origin", "refs/heads/main", "refs/tags/*").decode().split()[1::2]
    )
    if "refs/heads/main" not in there:
        raise UpstreamError(f"{url} has no branch main.")
    steps = [[f"refs/tags/{tag}"] for tag in named.table["fetch"]["steps"] if f"refs/tags/{tag}" in there]
    steps.append(
        ["refs/heads/main", *sorted(ref for ref in there if ref.startswith("refs/tags/") and "^" not in ref)]
    )
    for i, refs in enumerate(steps, 1):
        known = git.words("for-each-ref", "--format=%(refname)").decode().split()
        if i < len(steps) and set(refs) <= set(known):
            continue
        upto = refs[0].removeprefix("refs/tags/").removeprefix("refs/heads/")
        say(f"History up to {upto}, without file contents ({i} of {len(steps)})")
        specs = b"".join(f"+{ref}:{ref}\n".encode() for ref in refs)
        _watched(git, watch, specs, "fetch", "--progress", *_NO_MORE, "--stdin", "origin")
    return folder


def wanted_blobs(
    history: CloneHistory, named: Named, ledger: LedgerHistory, more: Iterable[str] = ()
) -> set[str]:
    """The hashes of all file contents that a check of the ledger, the source maps and the claims reads.

    What this history does not have (a fork may be older) is left out; for `more` NoSuchRef is raised.
    """
    wanted = {oid for ref in more for oid in history.changed_blobs(ref)}

    def add(blobs: Callable[[], Iterable[str | None]]) -> None:
        try:
            wanted.update(oid for oid in blobs() if oid)
        except NoSuchRef:
            pass

    for commit in ledger.recorded():
        add(lambda commit=commit: history.changed_blobs(commit.hash))
    for claim in named.claims:
        if claim.kind == "git" and {"added", "removed", "files", "has", "lacks"} & set(claim.proof):
            add(lambda claim=claim: history.changed_blobs(claim.proof["commit"]))
    for full, folders in ledger.table["files"].items():
        for folder in folders:
            add(lambda full=full, folder=folder: history.blobs(full, folder).values())
    for folder, lives in ledger.table["lives"].items():
        for died in {died for _, _, died, _ in lives if died}:
            add(lambda died=died, folder=folder: history.changed_blobs(died, folder))
    for _, ref, path, _, _ in ledger.table.get("words", []):
        if path is None:
            add(lambda ref=ref: history.changed_blobs(ref))
        else:
            add(lambda ref=ref, path=path: [history.blob(ref, path)])
    for ref, path in named.texts():
        add(lambda ref=ref, path=path: [history.blob(ref, path)])
    return wanted


def _fetch_blobs(history: CloneHistory, wanted: set[str], say: Say, watch: Watch) -> None:
    """Fetch what is missing of `wanted`, all at once; no fetch where nothing is."""
    missing = sorted(wanted - history.present())
    if not missing:
        return say(f"All {len(wanted)} file contents that the course names are here.")
    say(f"{len(missing)} file contents that the course names")
    git = QuietGit(git_dir_of(history.path), network=True)
    words = ("-c", "fetch.negotiationAlgorithm=noop", "fetch", "--progress", *_NO_MORE, "--stdin", "origin")
    _watched(git, watch, "".join(oid + "\n" for oid in missing).encode(), *words)


def _watched(git: QuietGit, watch: Watch, stdin: bytes, *words: str) -> None:
    """Run a fetch and report what git says of its progress."""
    ops = git_python().RemoteProgress
    names = {ops.COUNTING: "counting", ops.RECEIVING: "receiving", ops.RESOLVING: "resolving deltas"}

    def update(op: int, count: str | float, total: str | float | None = None, message: str = "") -> None:
        watch(names.get(op & ops.OP_MASK, "preparing"), float(count) / float(total) if total else None)

    handle = git_python().remote.to_progress_instance(update).new_message_handler()
    errors = []
    running = git.start(*words)  # ends its process when it is collected
    process = running.proc
    try:
        process.stdin.write(stdin)
        process.stdin.close()
    except BrokenPipeError:
        pass  # git has ended and says why on its standard error
    with io.TextIOWrapper(process.stderr, errors="replace") as lines:  # a carriage return ends a line too
        for line in lines:
            handle(line)
            if line.startswith(("fatal:", "error:")):
                errors.append(line)
    process.stdout.close()
    if process.wait():
        raise as_sentence("fetch", "".join(errors).encode())


def fetch_wheel(source: Path | None, ledger: LedgerHistory, say: Say) -> Wheel:
    """The wheel that is used from now on: `source`, or the recorded one, downloaded and not installed."""
    known = ledger.wheel
    if source is not None:
        path = source.expanduser().resolve()
    elif known is None:
        raise UpstreamError("The ledger names no wheel: give one with --from.")
    else:
        path = upstream_root() / known.name
        if not path.is_file():
            _download(known.version, path, say)
    wheel = Wheel(path)
    if known is not None and wheel.path.name == known.name and sha256_of(path) != known.sha256:
        raise UpstreamError(
            f"{path} is not the wheel that the ledger recorded: its SHA-256 differs. Remove it."
        )
    remember("wheel", path)
    say(f"{wheel.label.capitalize()} is read as a zip file; nothing of it is installed or imported.")
    return wheel


def _download(version: str, path: Path, say: Say) -> None:
    say(f"sglang {version} as a wheel, 39 MB, not installed")
    _, _, python, abi, platform = path.stem.split("-")
    work = path.parent / ".wheel"
    target = ["--only-binary=:all:", "--platform", platform, "--python-version", python[2:], "--abi", abi]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *target,
        "--implementation",
        "cp",
    ]
    done = subprocess.run(
        [*command, "--dest", str(work), f"sglang=={version}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UpstreamError(f"pip could not download sglang {version}: {last}")
    (work / path.name).replace(path)
    shutil.rmtree(work, ignore_errors=True)
