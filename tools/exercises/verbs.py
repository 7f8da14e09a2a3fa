"""`fledge exercise …`: a stage with a defect to mend, on a copy that is the reader's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.stages_door import BadInput
from ..provenance import REPO
from ..stages.story import verb
from ..upstream.history import UpstreamError
from ..upstream.source import open_history
from ..upstream.verbs import aside, say
from .mend import (
    HINTS,
    Exercise,
    Scratch,
    Spoilt,
    command,
    default_folder,
    find_exercise,
    keep,
    read_exercises,
    solution,
)
from .red import Red, run_tests

MORE = 5  # failing tests that are named
Name = Annotated[str, typer.Argument(metavar="NAME", help="An exercise; fledge exercise list names them.")]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir", file_okay=False, help="The copy's folder; default: exercises/NAME of the repository."
    ),
]


@verb
def list_exercises() -> None:
    """The exercises in the order of the stages, and how far you are with each in exercises/."""
    exercises = read_exercises()
    width = max(len(exercise.id) for exercise in exercises)
    for stage in dict.fromkeys(exercise.stage for exercise in exercises):
        say(stage)
        for exercise in exercises:
            if exercise.stage == stage:
                say(f"  {exercise.id:<{width}}  {_state(exercise):<11}  {exercise.title}")
    aside("Begin with: fledge exercise start NAME")


@verb
def start(name: Name, folder: Dir = None) -> None:
    """Copy the stage with the defect in it, for you to mend."""
    exercise, folder = _found(name, folder)
    Scratch.make(REPO, exercise, folder)
    _began(exercise, folder)


@verb
def hint(name: Name, folder: Dir = None) -> None:
    """Your next question; each call gives the next of three."""
    exercise, folder = _found(name, folder)
    scratch = Scratch.open(folder, exercise)
    if scratch.tried.green:
        say(f"You have mended it. {exercise.mended}\n")
        return _show_commit(exercise)
    if scratch.tried.hints == HINTS:
        aside("These were all. The last one again; `solution` opens after a try.")
    else:
        scratch.tried.hints += 1
        scratch.save()
    say(f"{scratch.tried.hints} of {HINTS}: {exercise.hints[scratch.tried.hints - 1]}")


@verb
def check(name: Name, folder: Dir = None) -> None:
    """Run the test that the defect fails on your copy, then those around it. Exit 0: mended, 1: not yet."""
    exercise, folder = _found(name, folder)
    scratch, shown = Scratch.open(folder, exercise), exercise.mutant.killed_by
    aside(f"{' '.join(shown)}, on {folder} …")
    red = run_tests(REPO, exercise, folder, shown, at_most=1)
    fits_only_that = False
    if not red:
        aside(f"It passes. Now what else must hold, a minute or so: {' '.join(exercise.also)} …")
        red = run_tests(REPO, exercise, folder, exercise.also)
        fits_only_that = bool(red)
    scratch.tried.checks += bool(scratch.edits())
    scratch.tried.green |= not red
    scratch.save()
    if red:
        if fits_only_that:
            others = "another does" if len(red) == 1 else f"{len(red)} others do"
            say(f"The case that was shown passes, {others} not. The first of them:")
        _show(red[0], folder, exercise.stage)
        for other in red[1:MORE]:
            say(f"red    {other.test}")
        if len(red) > MORE:
            say(f"and {len(red) - MORE} more")
        if scratch.tried.green:
            aside(f"\nYou had mended it. Your changes: {command('diff', exercise, folder)}")
        else:
            aside(f"\nA question that helps: {command('hint', exercise, folder)}")
        raise typer.Exit(1)
    say(f"green  {exercise.mended}\n")
    _show_commit(exercise)


@verb
def diff(name: Name, folder: Dir = None) -> None:
    """What you have changed in your copy."""
    exercise, folder = _found(name, folder)
    edits = Scratch.open(folder, exercise).edits()
    say(edits.rstrip("\n")) if edits else aside("You have changed nothing yet.")


@verb
def show_solution(
    name: Name,
    folder: Dir = None,
    give_up: Annotated[bool, typer.Option("--give-up", help="Show it without a try.")] = False,
) -> None:
    """What mends it, as a diff; after a check of an edit of yours, or with --give-up."""
    exercise, folder = _found(name, folder)
    if not give_up and not Scratch.open(folder, exercise).tried.checks:
        raise BadInput(
            f"Try first: edit {folder}, then {command('check', exercise, folder)}. "
            "The solution opens after that, or with --give-up."
        )
    say(solution(REPO, exercise))
    say(exercise.mended + "\n")
    _show_commit(exercise)


@verb
def reset(name: Name, folder: Dir = None) -> None:
    """Start over; what you have changed is kept beside it."""
    exercise, folder = _found(name, folder)
    try:
        kept = Scratch.open(folder, exercise).set_aside()
    except Spoilt:
        kept = keep(folder)
    if kept:
        say(f"Your work is kept in {kept}.")
    Scratch.make(REPO, exercise, folder)
    _began(exercise, folder)


def _found(name: str, folder: Path | None) -> tuple[Exercise, Path]:
    exercise = find_exercise(read_exercises(), name)
    return exercise, folder or default_folder(exercise)


def _state(exercise: Exercise) -> str:
    try:
        tried = Scratch.open(default_folder(exercise), exercise).tried
    except BadInput:
        return ""
    return "mended" if tried.green else "tried" if tried.checks else "begun"


def _began(exercise: Exercise, folder: Path) -> None:
    say(f"{exercise.title}\n\n{exercise.symptom}\n")
    say(f"The stage {exercise.stage} is in {folder}: a whole engine, with one defect in it. Mend it there.")
    say(f"See it fail: {command('check', exercise, folder)}")


def _show(red: Red, folder: Path, stage: str) -> None:
    say(f"red    {red.test}")
    for label, text in (
        ("holds", red.holds),
        ("expected", red.expected),
        ("got", red.got),
        ("first", red.first),
    ):
        if text:
            say(f"  {label:<9} {text}")
    if red.line and red.line != red.expected:
        say(f"  {'in':<9} {red.line}")
    for place in red.where:
        inside = place.removeprefix(f"stages/{stage}/")
        say(f"  {'where':<9} {place if inside == place else folder / inside}")


def _show_commit(exercise: Exercise) -> None:
    """The upstream commit that mended it, from the reader's clone or the ledger."""
    try:
        history = open_history()
        commit = history.commit(exercise.commit)
    except UpstreamError as error:
        return aside(f"Upstream: {exercise.commit[:10]}. {error}")
    say(f"Upstream  {commit.day}  {commit.short}  {commit.subject}")
    for change in commit.files:
        say(f"  +{change.added or 0:<5} -{change.removed or 0:<5} {change.path}")
    aside(f"From {history.label}. Line by line, with a clone: fledge upstream diff {commit.short}")
