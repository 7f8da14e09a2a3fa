"""What a long command says while it works: a bar on a terminal, a line for each step elsewhere, and another
where a step takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..models.head_progress import progress_bar

SILENCE = 15  # seconds without a line, at most


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to be called with what comes next, `total` times; all goes to standard error."""
    if not Console(stderr=True).is_terminal:
        with _lines() as advance:
            yield advance
        return
    with progress_bar() as bar:
        task = bar.add_task("", total=total)
        started = False

        def advance(what: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what:36}", advance=int(started))
            started = True

        yield advance
        bar.update(task, completed=total)


@contextmanager
def _lines() -> Iterator[Callable[[str], None]]:
    said, over = threading.Event(), False

    def advance(what: str) -> None:
        typer.echo(what, err=True)
        said.set()

    def fill_silence() -> None:
        waited = 0
        while not over:
            waited = 0 if said.wait(SILENCE) else waited + SILENCE
            said.clear()
            if waited:
                typer.echo(f"    {waited:.0f} s", err=True)

    thread = threading.Thread(target=fill_silence, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        over = True
        said.set()
        thread.join()
