"""`fledge stages list`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from ..bench.stages_door import Stage
from . import story


@story.verb
def list_stages() -> None:
    """The stages in the order of the story, with the upstream commit each of them stands at.

    Features are named where they arrive; no later stage loses one.
    """
    console = Console(highlight=False)
    stages = {stage.name: stage for stage in story.read_story(story.REPO)}
    known: set[str] = set()
    for name in story.ORDER:
        if name not in stages:
            console.print(f"[dim]{name}  not yet[/dim]")
            continue
        present = stages[name].table["features"]["present"]
        arriving = [feature for feature in present if feature not in known]
        known.update(present)
        console.print(f"[bold]{name}[/bold]  {escape(stages[name].table['title'])}")
        for line in (_facts(stages[name]), "+ " + " ".join(arriving)):
            console.print(Padding(escape(line), (0, 0, 0, 4)))


def _facts(stage: Stage) -> str:
    upstream, files = stage.table["upstream"], story.read_files(stage.path)
    python = [content for path, content in files.items() if path.endswith(".py")]
    lines = sum(map(story.line_count, python))
    commit, date = upstream["commit"][:10], upstream["date"]
    return f"sglang {commit}  #{upstream['pull']}  {date}  {lines:,} lines of Python in {len(python)} files"
