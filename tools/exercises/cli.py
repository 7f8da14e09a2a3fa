"""`fledge exercise …` and `fledge course …`: the verbs, each imported when it is run."""

import typer

from ..lazy import add_lazy

app = typer.Typer(no_args_is_help=True, help="Stages with a historical defect, for you to mend.")
for _name, _target, _help in (
    ("list", "list_exercises", "What there is, and how far you are."),
    ("start", "start", "Copy a stage with a defect in it."),
    ("hint", "hint", "Your next question, one of three."),
    ("check", "check", "Is it mended? Expected, got and where."),
    ("diff", "diff", "What you have changed."),
    ("solution", "show_solution", "What mends it; after a try."),
    ("reset", "reset", "Start over; your work is kept."),
):
    add_lazy(app, _name, f"tools.exercises.verbs:{_target}", _help)

course = typer.Typer(no_args_is_help=True, help="The author's gate over pages, questions and exercises.")
add_lazy(course, "check", "tools.exercises.course:check", "Fail where the course has a hole.")
