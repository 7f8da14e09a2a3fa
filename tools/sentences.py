"""Errors whose message is a sentence for the caller, how a command ends with one, and what it may suggest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ " Did you mean NAME?" for the nearest of `names`; "" where none is near."""
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


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
