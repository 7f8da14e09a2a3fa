"""The `fledge` command. Each group of verbs is a package of its own; this file only joins them.

Importing any `cli.py` must stay cheap: torch and whatever imports it come in with the verb that needs them.
"""

from typing import Annotated

import typer

from .docs.cli import app as docs_app
from .exercises.cli import app as exercise_app
from .exercises.cli import course as course_app
from .lazy import add_lazy
from .models.cli import app as models_app
from .stages.cli import app as stages_app
from .upstream.cli import app as upstream_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="EAGLE speculative decoding as it grew inside SGLang.",
)
app.add_typer(models_app, name="models")
app.add_typer(docs_app, name="docs")
app.add_typer(exercise_app, name="exercise")
app.add_typer(course_app, name="course")
app.add_typer(stages_app, name="stages")
app.add_typer(upstream_app, name="upstream")
add_lazy(app, "run", "tools.bench.run:run", "Stream one answer with each accepted run visible.")
add_lazy(
    app, "divergence", "tools.bench.divergence:divergence", "Find the first difference to plain decoding."
)
add_lazy(app, "compare", "tools.bench.compare:compare", "Same prompts: plain, chain and tree, as a table.")
add_lazy(app, "bench", "tools.bench.bench:bench", "Measure a stage, batch by batch, into a JSON file.")
add_lazy(app, "quiz", "tools.exercises.quiz:quiz", "Questions that upstream's history answers.")
add_lazy(app, "trace", "tools.bench.trace:trace", "Record every round of an answer; print its timeline.")


@app.command("check-env")
def check_env(
    packages: Annotated[bool, typer.Option("--packages", help="Check the installed packages only.")] = False,
) -> None:
    """Say what works here, and how to mend what does not."""
    from .check_env import main

    raise typer.Exit(main(["--packages"] if packages else []))


if __name__ == "__main__":
    app()
