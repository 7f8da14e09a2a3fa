"""Errors whose message is a sentence for the caller, and how a command ends with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def sentences(
    status: int, *errors: type[Exception], shown: Callable[[str], str] = lambda text: text
) -> Iterator[None]:
    """Around a block, or as a decorator: `errors` become their sentence on standard error and exit `status`.

    `shown` makes a text fit for a terminal where parts of it are somebody else's.
    """
    try:
        yield
    except errors as error:
        typer.echo(shown(str(error)), err=True)
        raise typer.Exit(status) from None
