"""`fledge stages check`: what must be true of the stages together, each finding with what to do about it.

Two neighbours differ only in files that the later one lists under [changed], each with its reason. That table
is all there is: whether a listed file is new, gone or changed shows in the two directories.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

import typer
from rich.console import Console
from rich.markup import escape

from ..bench.stages_door import BadInput, Stage
from . import story
from .mutants import read_mutant
from .units import split

AIM_LINES, MOST_LINES = 400, 600
OURS = ("stages", "tools", "tests")


@dataclass(frozen=True)
class Finding:
    where: str  # a path, with a line where there is one
    what: str
    mend: str


@story.verb
def check() -> None:
    """Fail where the stages do not hold together.

    Looked at: differences of neighbours that [changed] does not list, imports that leave a stage, symbols of
    stage.toml that do not exist, long files without a reason, shared files that name a stage, mutants that
    do not apply.
    """
    console = Console(highlight=False, soft_wrap=True)
    found = findings(story.REPO)
    for finding in found:
        console.print(
            f"[bold]{escape(finding.where)}[/bold] {escape(finding.what)}: [dim]{escape(finding.mend)}[/dim]"
        )
    if found:
        console.print(f"{len(found)} to mend.")
        raise typer.Exit(1)
    console.print("The stages hold together.")


def findings(repo: Path) -> list[Finding]:
    """Everything that is wrong with the stages of `repo`. Raises BadInput where they cannot be read."""
    stages = story.read_story(repo)
    files = {stage.name: story.read_files(stage.path) for stage in stages}
    found: list[Finding] = []
    for before, after in pairwise(stages):
        found += check_changed(files[before.name], after, files[after.name], before.name)
    for stage in stages:
        found += check_imports(stage.name, files[stage.name])
        found += check_symbols(stage, files[stage.name])
        found += check_lengths(stage, files[stage.name])
    found += check_names(stages, files)
    found += check_mutants(repo, stages)
    return found


def check_changed(
    before: dict[str, bytes], after: Stage, files: dict[str, bytes], name_before: str
) -> Iterator[Finding]:
    """The files that differ from the stage before, against the table [changed]."""
    listed, table = after.table.get("changed", {}), f"stages/{after.name}/stage.toml"
    differing = {path for path in before.keys() | files.keys() if before.get(path) != files.get(path)}
    differing -= set(story.OWN_FILES)
    for path in sorted(differing - listed.keys()):
        how = "is new" if path not in before else "is gone" if path not in files else "differs"
        yield Finding(
            f"stages/{after.name}/{path}",
            f"{how} since {name_before} and is not listed",
            f"spread the change with `fledge stages carry`, or give its reason under [changed] in {table}",
        )
    for path in sorted(listed.keys() - differing):
        yield Finding(table, f"lists {path}, which is as it was in {name_before}", "take it out of [changed]")
    for path in sorted(path for path, reason in listed.items() if not str(reason).strip()):
        yield Finding(table, f"gives no reason for {path}", "say under [changed] in a sentence why")


def check_imports(name: str, files: dict[str, bytes]) -> Iterator[Finding]:
    """Imports that leave the stage, and relative ones that lead to nothing in it."""
    for path in (path for path in files if path.endswith(".py")):
        package = PurePosixPath(path).parent.parts
        for node in ast.walk(_parse(name, path, files[path])):
            where = f"stages/{name}/{path}:{getattr(node, 'lineno', 0)}"
            for module in _absolute(node):
                if module.partition(".")[0] in OURS:
                    yield Finding(
                        where,
                        f"imports {module}",
                        "a stage imports itself by relative imports, and nothing of ours else",
                    )
            if isinstance(node, ast.ImportFrom) and node.level:
                if node.level > len(package) + 1:
                    yield Finding(
                        where, "imports from outside the stage", "take one dot fewer, or do without"
                    )
                elif missing := _missing(package[: len(package) + 1 - node.level], node, files):
                    yield Finding(
                        where, f"imports {missing}, which this stage does not have", "do without it"
                    )


def _absolute(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def _missing(package: tuple[str, ...], node: ast.ImportFrom, files: dict[str, bytes]) -> str | None:
    """The path of the module that a relative import starts from, if there is no such module."""
    path = "/".join([*package, *(node.module or "").split(".")]).strip("/")
    exists = f"{path}.py" in files or "/".join([path, "__init__.py"]).strip("/") in files
    return None if exists else f"{path}.py"


def check_symbols(stage: Stage, files: dict[str, bytes]) -> Iterator[Finding]:
    """The `here` of every entry of [[symbols]], "path:Class.name", against the code."""
    for symbol in stage.table.get("symbols", []):
        path, _, name = symbol["here"].partition(":")
        if path not in files or name not in _defined(stage.name, path, files[path]):
            yield Finding(
                f"stages/{stage.name}/stage.toml",
                f"names the symbol {symbol['here']}, which does not exist",
                "name it as it is called now, or take it out",
            )


def _defined(stage: str, path: str, content: bytes) -> set[str]:
    _parse(stage, path, content)  # refuses what is not Python
    return {unit.name for unit in split(content.decode(), is_python=True)}


def check_lengths(stage: Stage, files: dict[str, bytes]) -> Iterator[Finding]:
    """Long files against the table [long_files]."""
    reasons, table = stage.table.get("long_files", {}), f"stages/{stage.name}/stage.toml"
    lines = {path: story.line_count(content) for path, content in files.items() if path.endswith(".py")}
    for path, count in lines.items():
        where = f"stages/{stage.name}/{path}"
        if count > MOST_LINES:
            yield Finding(where, f"has {count} lines, over {MOST_LINES}", "it is two things: make two files")
        elif count > AIM_LINES and not str(reasons.get(path, "")).strip():
            mend = f"make it shorter, or give the reason under [long_files] in {table}"
            yield Finding(where, f"has {count} lines, over {AIM_LINES}", mend)
    for path in sorted(path for path in reasons if lines.get(path, 0) <= AIM_LINES):
        yield Finding(
            table, f"excuses {path}, which is not over {AIM_LINES} lines", "take it out of [long_files]"
        )


def check_names(stages: list[Stage], files: dict[str, dict[str, bytes]]) -> Iterator[Finding]:
    """Files that two neighbours share and that name a stage or the upstream commit of one.

    "part4" and "part 4" count as names; commits count from seven digits.
    """
    short = [name.partition("_")[0].replace("part", "part ?") for name in story.ORDER if name[:4] == "part"]
    names = re.compile(rf"\b({'|'.join([*story.ORDER, *short])})\b", re.IGNORECASE)
    commits = [stage.table["upstream"]["commit"] for stage in stages]
    for before, after in pairwise(stages):
        for path, content in files[after.name].items():
            if content != files[before.name].get(path):
                continue
            for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
                hashes = re.findall(r"\b[0-9a-f]{7,40}\b", line)
                named = [match.group() for match in names.finditer(line)]
                named += [word for word in hashes if any(commit.startswith(word) for commit in commits)]
                for name in named:
                    yield Finding(
                        f"stages/{after.name}/{path}:{number}",
                        f"names {name} and is shared with {before.name}",
                        "let stage.toml or README.md say it",
                    )


def check_mutants(repo: Path, stages: list[Stage]) -> Iterator[Finding]:
    """Every patch of tests/mutants: its header, and whether it applies."""
    for path in sorted((repo / "tests" / "mutants").glob("*.patch")):
        where = path.relative_to(repo).as_posix()
        try:
            mutant = read_mutant(path)
        except BadInput as error:
            yield Finding(where, str(error), "mend the header")
            continue
        if mutant.stage not in {stage.name for stage in stages}:
            yield Finding(where, f"is for {mutant.stage}, which does not exist", "name a stage")
        elif error := mutant.apply(repo, only_check=True):
            yield Finding(where, f"does not apply ({error})", "make the patch anew")


def _parse(stage: str, path: str, content: bytes) -> ast.Module:
    try:
        return ast.parse(content)
    except SyntaxError as error:
        raise BadInput(
            f"stages/{stage}/{path}:{error.lineno} is not Python ({error.msg}): mend it first."
        ) from None
