"""Flags and commands, read out of the code: nothing on the page of reference is written by hand."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path

import click
import typer
from typer.testing import CliRunner

from .page import SNIPPETS, fence, table
from .stages import ORDER, title_of

WIDTH = "92"  # columns of a command's help


def files(repo: Path) -> dict[str, str]:
    """Flags of the engine, which stage has which feature, and the help of every command."""
    server_args = sorted((repo / "stages").glob("*/server_args.py"))[-1]  # the same in every stage
    module = ast.parse(server_args.read_text(encoding="utf-8"))
    lines = server_args.read_text(encoding="utf-8").splitlines()
    return {
        f"{SNIPPETS}/reference/flags.md": flags(module, lines),
        f"{SNIPPETS}/reference/features.md": features(module, repo),
        f"{SNIPPETS}/reference/commands.md": commands(),
    }


def flags(module: ast.Module, lines: list[str]) -> str:
    """Every field of ServerArgs: its type, its default, and the comment behind it."""
    [fields] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    rows = []
    for node in fields.body:
        if not isinstance(node, ast.AnnAssign) or node.target.id == "features":
            continue
        default = "required" if node.value is None else f"`{ast.unparse(node.value)}`"
        comment = lines[node.end_lineno - 1].partition("  # ")[2]
        rows.append([f"`{node.target.id}`", f"`{ast.unparse(node.annotation)}`", default, comment])
    return table(["keyword", "type", "default", ""], rows)


def features(module: ast.Module, repo: Path) -> str:
    """Which stage has which feature."""
    [node] = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FEATURES"
    ]
    present = {}
    for stage in ORDER:
        path = repo / "stages" / stage / "stage.toml"
        if path.is_file():
            present[stage] = tomllib.loads(path.read_text(encoding="utf-8"))["features"]["present"]
    rows = [
        [f"`{name}`", what, *("yes" if name in there else "–" for there in present.values())]
        for name, what in ast.literal_eval(node).items()
    ]
    return table(["feature", "what", *(f"[{title_of(stage)}]({stage}.md)" for stage in present)], rows)


def commands() -> str:
    """The help of `fledge` and of every verb, as the terminal shows it."""
    from ..cli import app

    parts = []
    for words in paths(typer.main.get_command(app)):
        name = " ".join(["fledge", *words])
        parts.append(f"### {name} {{ #{name.replace(' ', '-')} }}\n\n{fence(help_of(app, words), 'text')}")
    return "\n\n".join(parts)


def paths(command: click.Command, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command below one, itself first."""
    found = [before]
    for name, child in getattr(command, "commands", {}).items():
        found += paths(child, (*before, name))
    return found


def help_of(app: typer.Typer, words: tuple[str, ...]) -> str:
    environment = {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="fledge", catch_exceptions=False)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines())
