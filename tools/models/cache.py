"""Where models live on disk, and when a folder there counts as whole.

A finished folder carries `fledge.json`, a manifest with the size and SHA-256 of every other file; it is
written before the folder gets its final name, so a folder without it, or one that disagrees with it, is not
a model.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "fledge.json"
FETCHED = ("smollm2-135m-instruct", "smollm2-135m-eagle", "smollm2-135m-eagle3")


class ModelError(Exception):
    """Something about a model's files that the reader can mend; the message says how."""


def cache_root() -> Path:
    """The cache folder: `$FLEDGE_CACHE`, or `~/.cache/fledge` where that is unset or empty."""
    return Path(os.environ.get("FLEDGE_CACHE") or "~/.cache/fledge").expanduser()


def models_root() -> Path:
    """The folder that holds one folder per model."""
    return cache_root() / "models"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as hex digits, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict | None:
    """The manifest of `folder`, or None where there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def is_whole(folder: Path, hashes: bool = False) -> bool:
    """Whether every file that the manifest lists is there with its size and, if asked, its SHA-256."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return False
        if hashes and sha256_of(path) != entry["sha256"]:
            return False
    return True


def describe_files(folder: Path) -> dict[str, dict]:
    """`{name: {"bytes", "sha256"}}` for every file of `folder` but the manifest, sorted by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}


def write_json(path: Path, data: dict) -> None:
    """Write `data` so that a reader finds the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def publish(work: Path, final: Path, about: dict) -> None:
    """Give the finished folder `work` its manifest (`about` plus the files) and then its name `final`.

    Both must lie on one file system. A folder that has the name is moved aside first and removed last.
    """
    write_json(work / MANIFEST, {**about, "files": describe_files(work)})
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(work, final)
    shutil.rmtree(old, ignore_errors=True)


def model_path(name: str) -> Path:
    """The folder of a model in the cache.

    Raises ModelError, saying what to run, for a name that is not there or a folder that is not whole.
    """
    folder = models_root() / name
    inside = name not in ("", ".", "..") and "/" not in name
    if inside and name in FETCHED:
        if is_whole(folder):
            return folder
        state = "is there but incomplete" if folder.exists() else "has not been fetched yet"
        raise ModelError(f"The model {name!r} {state} (looked in {folder}). Run: fledge models fetch")
    if inside and (folder / "config.json").is_file():
        return folder
    known = sorted({*FETCHED, *(path.parent.name for path in models_root().glob("[!.]*/config.json"))})
    raise ModelError(f"There is no model named {name!r}. Known names: {', '.join(known)}.")


def find_model(name: str) -> Path:
    """The folder `name` itself if it is one, else a model's in the cache. Raises ModelError as above."""
    return Path(name) if Path(name).is_dir() else model_path(name)


@contextmanager
def cache_lock() -> Iterator[None]:
    """Hold the cache for one writer: a second `fetch` waits for the first and then finds its work done.

    Raises ModelError where the cache folder cannot be written.
    """
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"Cannot write to the cache folder {root} ({error.strerror}). "
            "Set FLEDGE_CACHE to a folder that can be written."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
