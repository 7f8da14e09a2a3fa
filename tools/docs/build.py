"""`fledge docs build` and `serve`: write what is generated, then let mkdocs do the rest.

Generated are fragments, docs/generated/snippets, which the pages include by name, and the player's data.
Nothing of it is committed. A page that includes what nobody generates fails the build.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..provenance import REPO
from . import charts, claims, code, errata, exercises, history, reference, stages, traces
from .page import Problem

GENERATED = Path("docs") / "generated"
SOURCES = (claims, errata, code, stages, history, charts, traces, reference, exercises)


def generated(repo: Path = REPO) -> dict[str, str]:
    """Path under docs/generated → text, for everything that pages are made of besides themselves.

    Raises Problem, with a sentence, for data that contradicts itself or names what does not exist.
    """
    files: dict[str, str] = {}
    for source in SOURCES:
        for path, text in source.files(repo).items():
            files[path] = text if text.endswith("\n") else text + "\n"
    return files


def write(repo: Path = REPO) -> int:
    """Bring docs/generated up to date and take away what is no longer made; returns the number of files."""
    folder, files = repo / GENERATED, generated(repo)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink(missing_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # `serve` watches these
            path.write_text(text, encoding="utf-8")
    return len(files)


def build(
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where the site goes; default: site/.")
    ] = None,
) -> None:
    """Write what is generated, then build the site: a dead link or a missing fragment is an error."""
    _prepare()
    _mkdocs("build", *(["--site-dir", str(out.absolute())] if out else []))
    index = (out.absolute() if out else REPO / "site") / "index.html"
    print(f"the site is built: open {index}; the search works from there too")


def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 8000,
) -> None:
    """Serve the site on this machine, and build it anew whenever a page changes."""
    _prepare()
    _mkdocs("serve", "--dev-addr", f"127.0.0.1:{port}")


def _prepare() -> None:
    if importlib.util.find_spec("material") is None:
        _stop("mkdocs-material is not installed: pip install -c constraints.txt -e '.[docs]'")
    try:
        write()
    except Problem as problem:
        _stop(str(problem))


def _mkdocs(*arguments: str) -> None:
    try:
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # its news of the successor, in every build
        command = [sys.executable, "-m", "mkdocs", *arguments]
        done = subprocess.run(command, cwd=REPO, env=environment, check=False)
    except KeyboardInterrupt:  # how `serve` ends
        return
    if done.returncode:
        raise typer.Exit(done.returncode)


def _stop(sentence: str) -> None:
    typer.echo(sentence, err=True)
    raise typer.Exit(2)
