"""Where a number comes from: commit, sources, machine, versions; for every JSON file that holds numbers."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
CODE = (".py", ".cpp")  # files of a stage that decide what it computes
MEASURED = ("stages", "tools")  # what decides a number; documents and results may change freely


def commit_and_dirty() -> tuple[str | None, bool | None]:
    """The commit of this tree and whether something under MEASURED differs from it; None where unknown.

    A tree that is no clone takes both from `$FLEDGE_COMMIT`, written as `git describe --always --dirty
    --abbrev=40` prints them.
    """
    # A folder that merely lies inside somebody else's clone has no commit of its own.
    if _said("git", "rev-parse", "--show-prefix") == "":
        status = _said("git", "status", "--porcelain", "--", *MEASURED)
        return _said("git", "rev-parse", "HEAD"), None if status is None else status != ""
    told = re.fullmatch(r"([0-9a-f]{40})(-dirty)?", os.environ.get("FLEDGE_COMMIT", ""))
    return (told[1], told[2] is not None) if told else (None, None)


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Commit, dirty flag, machine and versions; `device` is "cpu" or "cuda"."""
    import torch

    commit, dirty = commit_and_dirty()
    on_gpu = torch.device(device).type == "cuda"
    found: dict[str, Any] = {
        "commit": commit,
        "dirty": dirty,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if on_gpu:
        found["driver"] = _driver()
        found["versions"]["cuda"] = torch.version.cuda
    for package in ("triton", "transformers", "numpy", "flashinfer-python", "apache-tvm-ffi"):
        try:
            found["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def sources_sha256(folder: Path) -> str:
    """One hash over names and contents of a folder's Python and C++ files: the same code, the same hash.

    Defaults that a stage.toml gives are among the flags of a result, and all else in it is for readers.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in CODE):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def changed_files(commit: str | None, folder: Path) -> int | None:
    """How many of the files that `sources_sha256` reads differ from a commit; None where git cannot tell."""
    if commit is None or _said("git", "rev-parse", "--show-prefix") != "":
        return None
    names = _said("git", "diff", "--name-only", "--no-renames", commit, "--", str(folder))
    return None if names is None else sum(name.endswith(CODE) for name in names.splitlines())


def _driver() -> str | None:
    drivers = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if drivers:
        return drivers.splitlines()[0]
    return _first(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", "/proc/driver/nvidia/version")


def _cpu_model() -> str:
    return _first(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.processor()


def _first(pattern: str, path: str) -> str | None:
    """What the pattern's group finds in a file; None where there is no such file or nothing in it."""
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _said(*command: str) -> str | None:
    """What a command printed, without the newline; None where it failed or is not there."""
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
