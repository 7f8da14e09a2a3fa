"""`python -m tools` is the `fledge` command where nothing is installed, from the root of the repository."""

from .cli import app

app(prog_name="fledge")
