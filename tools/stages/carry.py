"""`fledge stages carry`: one stage's change, brought to the others.

A stage that had the file byte for byte gets the new one as it is; one that had a version of its own gets the
change merged into it, three-way. So files that were the same in two stages before are the same afterwards.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from ..bench.stages_door import BadInput
from . import story
from .merge import Clash, is_settled, merge

Tree = dict[str, bytes]


@dataclass(frozen=True)
class Change:
    """What happened to one file: None is no file; a rename has two paths and both contents."""

    old: str | None
    new: str | None
    before: bytes | None
    after: bytes | None

    @property
    def what(self) -> str:
        if self.old is None:
            return f"{self.new} (new)"
        if self.new is None:
            return f"{self.old} (deleted)"
        return self.new if self.old == self.new else f"{self.old} → {self.new}"


@dataclass
class Plan:
    """What a carry would write, by stage and path (None deletes), what stands in its way, what it leaves."""

    writes: dict[tuple[str, str], bytes | None] = field(default_factory=dict)
    how: list[tuple[str, str, str]] = field(default_factory=list)  # stage, change, in words
    clashes: list[tuple[str, str, Clash]] = field(default_factory=list)  # stage, path, where and what

    def add(
        self, name: str, change: Change, wanted: dict[str | None, bytes | None], now: Tree, how: str
    ) -> None:
        """Write what of `wanted`, path → content, a stage does not have already."""
        writes = {
            (name, path): content for path, content in wanted.items() if path and now.get(path) != content
        }
        if writes:
            self.writes |= writes
            self.how.append((name, change.what, how))


@story.verb
def carry(
    stage: Annotated[str, typer.Argument(help="The stage that was changed.")],
    since: Annotated[
        str, typer.Option(metavar="REV", help="Its changes are the work tree's since this revision.")
    ] = "HEAD",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
) -> None:
    """Spread one stage's change to the other stages, all or nothing.

    The change goes both ways along the run of neighbours where the file was the same to the byte at REV;
    beyond the run it is merged three-way into the stages that have the file. stage.toml and README.md stay at
    home.

    - A new file goes to all later stages, but not past one that has a file of that name.
    - A deleted file is deleted along the run; versions of their own stay.
    - A renamed file is renamed wherever it was, with its changes.

    If a merge conflicts, in a version of its own or with uncommitted changes there, nothing is written and
    the places are shown. A version whose conflicting lines were changed by hand since REV is left alone.
    """
    console = Console(highlight=False, soft_wrap=True)
    plan = plan_carry(story.REPO, stage, since)
    if plan.clashes:
        for name, path, clash in plan.clashes:
            place = f"stages/{name}/{path}" + (f":{clash.line}" if clash.line else "")
            console.print(f"[bold red]conflict[/bold red] {escape(place)}")
            console.print(Syntax(clash.text, "python", background_color="default"))
        console.print(
            f"Nothing was written; {len(plan.clashes)} to settle. Make the change by hand at the places "
            "named, or restore there what is not committed, and carry again."
        )
        raise typer.Exit(1)
    for name, what, how in plan.how:
        console.print(f"[bold]{name}[/bold] {escape(what)}: {how}")
    if not plan.writes:
        console.print("Nothing to carry." if not plan.how else "Nothing to write.")
        return
    if dry_run:
        console.print(f"{len(plan.writes)} files would be written.")
        return
    write(story.REPO, plan)
    console.print(f"{len(plan.writes)} files written. Next: fledge stages check")


def plan_carry(repo: Path, source: str, since: str) -> Plan:
    """What carrying `source`'s change since revision `since` to the other stages of `repo` means.

    Raises BadInput for a stage or a revision that is not there.
    """
    stages = story.read_story(repo)
    names = [stage.name for stage in stages]
    if source not in names:
        raise BadInput(f"There is no stage {source!r} to carry from: give one of {', '.join(names)}.")
    now = {stage.name: story.read_files(stage.path) for stage in stages}
    then = read_revision(repo, since)
    if source not in then:
        raise BadInput(f"{since} has no stage {source}: give a revision that has it with --since.")
    # A stage that is newer than the revision is taken as it is.
    then = {name: then.get(name, now[name]) for name in names}
    plan, place = Plan(), names.index(source)
    for change in find_changes(then[source], now[source]):
        earlier, later = names[:place][::-1], names[place + 1 :]
        if change.old is None:
            _spread_new(plan, change, later, now)
        else:
            _spread(plan, change, earlier, then, now)
            _spread(plan, change, later, then, now)
    return plan


def read_revision(repo: Path, revision: str) -> dict[str, Tree]:
    """The files of each stage at a revision. Raises BadInput where there is none, or no stages/ in it."""
    archive = story.git("archive", "--format=tar", revision, "stages", cwd=repo).stdout
    trees: dict[str, Tree] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            stage, _, path = member.name.removeprefix("stages/").partition("/")
            if member.isfile() and path:
                trees.setdefault(stage, {})[path] = tar.extractfile(member).read()
    return trees


def find_changes(before: Tree, after: Tree) -> list[Change]:
    """Changed, new, deleted and renamed files; git decides what is a rename."""
    changes = []
    gone = {path: content for path, content in before.items() if path not in after}
    come = {path: content for path, content in after.items() if path not in before}
    for old, new in renames(gone, come):
        changes.append(Change(old, new, gone.pop(old), come.pop(new)))
    changes += [Change(path, None, content, None) for path, content in gone.items()]
    changes += [Change(None, path, None, content) for path, content in come.items()]
    changes += [
        Change(path, path, before[path], after[path])
        for path in before.keys() & after.keys()
        if before[path] != after[path]
    ]
    changes = [change for change in changes if (change.new or change.old) not in story.OWN_FILES]
    return sorted(changes, key=lambda change: change.new or change.old)


def renames(gone: Tree, come: Tree) -> list[tuple[str, str]]:
    """Pairs of an old and a new path with like contents, by git's rule; empty files are never paired."""
    if not gone or not come:
        return []
    with tempfile.TemporaryDirectory() as folder:
        for side, tree in (("a", gone), ("b", come)):
            for path, content in tree.items():
                target = Path(folder, side, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        options = ["--no-index", "--no-rename-empty", "--diff-filter=R", "-M", "--name-status", "-z"]
        done = story.git("diff", *options, "a", "b", cwd=Path(folder), check=False)
    words = done.stdout.decode().split("\0")[:-1]
    return [(words[i + 1][2:], words[i + 2][2:]) for i in range(0, len(words), 3)]


def _spread(
    plan: Plan, change: Change, others: list[str], then: dict[str, Tree], now: dict[str, Tree]
) -> None:
    """Take a changed, renamed or deleted file along `others`, nearest first."""
    for name in others:
        committed = then[name].get(change.old)
        if committed is None:
            continue
        if change.new is None and committed != change.before:
            plan.how.append((name, change.what, "keeps its own version"))
            return
        if change.new is None:
            carried, clashes = None, []
        else:
            carried, clashes = merge(committed, change.before, change.after, (name, "before", "the change"))
        # An earlier carry may have renamed it already.
        standing = now[name].get(change.old, now[name].get(change.new))
        if clashes and standing and all(is_settled(clash, committed, standing) for clash in clashes):
            plan.how.append((name, change.what, "settled by hand, left alone"))
            continue
        if not clashes:
            carried, clashes = _with_uncommitted(change, name, committed, carried, standing, now[name])
        plan.clashes += [(name, change.new or change.old, clash) for clash in clashes]
        if clashes:
            continue
        how = "deleted" if change.new is None else "the same" if committed == change.before else "merged"
        plan.add(name, change, {change.old: None, change.new: carried}, now[name], how)


def _with_uncommitted(
    change: Change, name: str, committed: bytes, carried: bytes | None, standing: bytes | None, now: Tree
) -> tuple[bytes | None, list[Clash]]:
    """What the stage gets: `carried`, joined with what was changed there and not yet committed."""
    if carried is None:
        uncommitted = standing not in (None, committed)
        return None, [Clash(0, "deleted by the change, and changed here without a commit")] * uncommitted
    if standing is None:
        return None, [Clash(0, "deleted here without a commit")]
    labels = (f"{name}, uncommitted", f"{name}, committed", "the change")
    result, clashes = merge(standing, committed, carried, labels)
    if change.old in now and change.old != change.new and now.get(change.new) not in (None, result):
        clashes = [*clashes, Clash(0, f"{change.old} was renamed to this, and a file of that name is here")]
    return result, clashes


def _spread_new(plan: Plan, change: Change, later: list[str], now: dict[str, Tree]) -> None:
    for name in later:
        if now[name].get(change.new) not in (None, change.after):
            plan.how.append((name, change.what, "has a file of that name, left alone"))
            return
        plan.add(name, change, {change.new: change.after}, now[name], "new")


def write(repo: Path, plan: Plan) -> None:
    """Write every file of a plan without clashes: each is the old one or the new one, never a part."""
    for (name, path), content in plan.writes.items():
        target = repo / "stages" / name / path
        if content is None:
            target.unlink()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, target)
