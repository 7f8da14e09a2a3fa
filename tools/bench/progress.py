"""What a long command says while it works: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from ..models.head_progress import progress_bar


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to be called with what comes next, `total` times; all goes to standard error."""
    if not Console(stderr=True).is_terminal:
        yield lambda what: typer.echo(what, err=True)
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
