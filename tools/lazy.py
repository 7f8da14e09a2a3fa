"""Commands that are imported when they are run, so that `fledge --help` needs neither torch nor time.

A group's `cli.py` names a verb, one line of help and `module:attribute`; the verb's own module declares its
options. A module that is missing or broken raises its ImportError when the verb is used.
"""

from importlib import import_module

import typer


def add_lazy(app: typer.Typer, name: str, target: str, help: str) -> None:
    """Register verb `name` on `app`; `target` is "module:attribute" of a Typer app or of a function for one.

    All arguments, `--help` included, go to the target.
    """

    @app.command(
        name,
        help=help,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
        },
    )
    def forward(context: typer.Context) -> None:
        load(target)(args=context.args, prog_name=context.command_path)


def load(target: str) -> typer.Typer:
    """The Typer app that "module:attribute" stands for; a function becomes the one command of a new app."""
    module, attribute = target.split(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return found
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(found)
    return app
