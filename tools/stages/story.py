"""The stages in the order of the story, and the files each of them is made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..bench.stages_door import STAGES, BadInput, Stage, all_stages
from ..sentences import sentences

REPO = STAGES.parent
ORDER = ("part1_draft_model", "part2_cudagraph_dp", "part3_scheduler", "part4_worker", "spec_v2")
OWN_FILES = ("stage.toml", "README.md")  # what says which stage it is: each stage has its own


def read_story(repo: Path) -> list[Stage]:
    """The stages under `repo`/stages that exist, in the order of the story.

    Raises BadInput for a stage that is not part of it.
    """
    stages = {stage.name: stage for stage in all_stages(repo / "stages")}
    if strangers := sorted(set(stages) - set(ORDER)):
        raise BadInput(
            f"stages/{strangers[0]} has no place in the story: rename it, or name it in ORDER of {__file__}."
        )
    return [stages[name] for name in ORDER if name in stages]


def read_files(folder: Path) -> dict[str, bytes]:
    """Relative path → content of every file of a stage; hidden files and what Python caches are none."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder): path for path in paths}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in names.items()
        if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }


def line_count(content: bytes) -> int:
    return len(content.splitlines())


def git(*arguments: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    """Run git. Raises BadInput with git's own words where it fails and `check` is set."""
    done = subprocess.run(["git", *map(str, arguments)], cwd=cwd, capture_output=True, check=False)
    if check and done.returncode:
        raise BadInput(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done


verb = sentences(2, BadInput)  # of a command
