"""What the recorded ledger tells, as tables and one drawing: commits, worker files, births and deaths."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from ..upstream.history import SPECULATIVE, UPSTREAM_URL, Commit, Life, NotRecorded, UpstreamError, workers
from ..upstream.ledger import LedgerHistory
from .page import SNIPPETS, Problem, table

WORKER = f"{SPECULATIVE}/eagle_worker.py"
PART4, DELETED = "815dce0554", "28c1a3cb45"


def files(repo: Path) -> dict[str, str]:
    """One fragment for each function below."""
    ledger = load(repo)
    made: dict[str, Callable[[LedgerHistory], str]] = {
        "twelve": lambda ledger: commit_table(ledger.group("chapter")),
        "groundwork": lambda ledger: commit_table(ledger.group("groundwork")),
        "month": lambda ledger: commit_table(ledger.group("month")),
        "spring": lambda ledger: commit_table(ledger.group("spring")),
        "since": lambda ledger: commit_table(ledger.group("since")),
        "fixes": lambda ledger: commit_table(ledger.group("fixes")),
        "price": price,
        "workers": worker_table,
        "lives": lives_picture,
    }
    try:
        return {f"{SNIPPETS}/history/{name}.md": make(ledger) for name, make in made.items()}
    except UpstreamError as error:
        raise Problem(str(error)) from None


def load(repo: Path) -> LedgerHistory:
    try:
        return LedgerHistory.load(repo / "docs" / "data" / "ledger.json")
    except UpstreamError as error:
        raise Problem(str(error)) from None


def pull_of(commit: Commit) -> str:
    return f"#{commit.pull}" if commit.pull else ""


def commit_link(commit: str) -> str:
    """A full hash, shortened, as a link to it; nothing is loaded from there."""
    return f"[`{commit[:10]}`]({UPSTREAM_URL.removesuffix('.git')}/commit/{commit})"


def commit_table(commits: list[Commit]) -> str:
    """A line for each commit, as `git log` would list them."""
    rows = [
        [day(commit.day), day(commit_link(commit.hash)), pull_of(commit), text(commit.title)]
        for commit in commits
    ]
    return table(["date", "commit", "PR", "title"], rows)


def day(words: str) -> str:
    """A date or a hash that no line end divides."""
    return f'<span class="day">{words}</span>'


def text(words: str) -> str:
    """Words of somebody else's as plain Markdown text: nothing in them is markup."""
    for sign in "\\`*_{}[]<>#":
        words = words.replace(sign, "\\" + sign)
    return words


def price(ledger: LedgerHistory) -> str:
    """How long eagle_worker.py was: when it came, at v0.4.6, and when it was deleted."""
    born, gone = ledger.head(PART4), ledger.commit(DELETED)
    removed = next(change.removed for change in gone.files if change.path == WORKER)
    rows = [
        [day(born.day), f"part 4, {commit_link(born.hash)}", f"{ledger.line_count(PART4, WORKER):,}"],
        [day(ledger.head("v0.4.6").committed[:10]), "`v0.4.6`", f"{ledger.line_count('v0.4.6', WORKER):,}"],
        [
            day(gone.day),
            f"the commit before {commit_link(gone.hash)} (#{gone.pull}) deletes it",
            f"{removed:,}",
        ],
    ]
    return table(["date", "state", "lines of `eagle_worker.py`"], rows)


def worker_table(ledger: LedgerHistory) -> str:
    """The chapter's second listing: files and worker files of speculative/, ref by ref."""
    rows = []
    for ref, label in (("v0.4.6", "`v0.4.6`"), ("v0.5.0rc0", "`v0.5.0rc0`"), ("main", None)):
        found = [path for path in ledger.files(ref) if path.endswith(".py")]
        label = label or f"`main`, {ledger.head(ref).committed[:10]}"
        rows.append([label, str(len(found)), str(len(workers(found))), names(workers(found))])
    if ledger.wheel is not None:
        found = ledger.wheel.files()
        rows.append(
            [
                f"wheel {ledger.wheel.version}",
                str(len(found)),
                str(len(workers(found))),
                names(workers(found)),
            ]
        )
    return table(["state", "Python files", "with `_worker`", "which"], rows)


def names(paths: list[str]) -> str:
    return ", ".join(f"`{path.rpartition('/')[2]}`" for path in paths)


def lives_picture(ledger: LedgerHistory) -> str:
    """Which worker file existed when, as a drawing of 360 px that fits a phone."""
    lives = [life for life in ledger.lives() if "_worker" in life.path.rpartition("/")[2]]
    end = date.fromisoformat(ledger.head("main").committed[:10])
    start = date(2025, 1, 1)
    width, row, top = 360, 27, 22

    def x(day: str) -> float:
        return 4 + (width - 8) * (date.fromisoformat(day) - start).days / (end - start).days

    parts = []
    for year, month in ((2025, 1), (2025, 7), (2026, 1), (2026, 7)):
        at = x(f"{year}-{month:02}-01")
        parts.append(f'<path class="grid" d="M{at:.1f} 16V{top + row * len(lives)}"/>')
        anchor = "start" if month == 1 and year == 2025 else "middle"
        parts.append(
            f'<text class="small" x="{at:.1f}" y="11" text-anchor="{anchor}">{year}-{month:02}</text>'
        )
    for i, life in enumerate(lives):
        born, died = day_of(ledger, life.born), day_of(ledger, life.died) if life.died else None
        left, right = x(born), x(died) if died else width - 4.0
        y, state = top + i * row, "gone" if died else "alive"
        title = f"{born} to {died or 'now'}" + (
            f", became {life.became.rpartition('/')[2]}" if life.became else ""
        )
        name = label_of(life)
        fits = left + 6.6 * len(name) < width - 4.0  # else the name ends where the bar ends
        anchor, at = ("start", left) if fits else ("end", max(right, 6.6 * len(name)))
        parts.append(
            f"<g><title>{name}: {title}</title>"
            f'<text class="over" x="{at:.1f}" y="{y + 11}" text-anchor="{anchor}">{name}</text>'
            f'<rect class="life {state}" x="{left:.1f}" y="{y + 15}" width="{max(2.0, right - left):.1f}" '
            f'height="7" rx="2"/></g>'
        )
    body = "\n".join(parts)
    return (
        f'<figure class="drawing"><svg viewBox="0 0 {width} {top + row * len(lives) + 6}" role="img" '
        f'aria-label="Which worker file existed when">\n{body}\n</svg>\n<figcaption>Files of '
        f"<code>speculative/</code> with <code>_worker</code> in their name, from "
        f"{start:%Y-%m} to {end}. Filled: still there at the end.</figcaption></figure>"
    )


def label_of(life: Life) -> str:
    return life.path.rpartition("/")[2].removesuffix(".py")


def day_of(ledger: LedgerHistory, commit: str) -> str:
    try:
        return ledger.head(commit).day
    except NotRecorded:
        raise Problem(f"The ledger has no date of {commit}: record it anew.") from None
