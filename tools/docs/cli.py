"""`fledge docs …`: build the site, or serve it."""

import typer

from ..lazy import add_lazy

app = typer.Typer(no_args_is_help=True, help="Build the site, or serve it while you write.")
add_lazy(app, "build", "tools.docs.build:build", "Write what is generated, then build the site strictly.")
add_lazy(
    app, "serve", "tools.docs.build:serve", "The same, served on this machine and rebuilt on each change."
)
