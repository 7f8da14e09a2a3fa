"""The generated parts of a stage's page: where it stands, its invariants, its diff, and what it lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..stages.diff_html import STYLE, render_fragment
from ..stages.fold import fold
from ..stages.story import ORDER
from ..upstream.history import UpstreamError
from ..upstream.ledger import LedgerHistory
from ..upstream.source import open_history
from . import history
from .invariants import invariant_list, read_invariants
from .page import SNIPPETS, Problem, fence, not_yet, read_toml, table
from .page import fold as fold_away

TITLES = ("Part 1", "Part 2", "Part 3", "Part 4", "Spec v2")
SRT = "python/sglang/srt/"


def title_of(stage: str) -> str:
    return TITLES[ORDER.index(stage)]


def files(repo: Path) -> dict[str, str]:
    """For every stage of the story, built or not, the fragments of its page."""
    ledger = history.load(repo)
    invariants = read_invariants(repo)
    found: dict[str, str] = {"fold.css": STYLE}
    for stage in ORDER:
        path = repo / "stages" / stage / "stage.toml"
        facts = read_toml(path) if path.is_file() else None
        parts = {
            "facts": stands(stage, facts, ledger),
            "invariants": invariant_list(stage, invariants),
            "diff": diff(repo, stage, facts),
            "touched": touched(stage, ledger),
            "symbols": symbols(stage, facts),
            "run": run(stage, facts),
            "not_here": not_here(facts),
            "since": since(facts, ledger),
        }
        found |= {f"{SNIPPETS}/stage/{stage}/{name}.md": text for name, text in parts.items()}
    return found


def missing(what: str) -> str:
    return not_yet(f"This stage is not built yet; {what} will stand here as soon as it is.")


# Where it stands


def stands(stage: str, facts: dict[str, Any] | None, ledger: LedgerHistory) -> str:
    """Title, commit and features."""
    if facts is None:
        return missing("where it stands upstream and which features it brings")
    upstream = facts["upstream"]
    until = f", and what followed up to `{upstream['until_tag']}`" if "until_tag" in upstream else ""
    present = ", ".join(f"`{name}`" for name in facts["features"]["present"])
    rows = [
        [
            "upstream",
            f"{history.commit_link(upstream['commit'])} (#{upstream['pull']}, {upstream['date']}){until}",
        ],
        ["what", facts["summary"]],
        ["features", present],
    ]
    return table(["", stage], rows)


# The diff


def diff(repo: Path, stage: str, facts: dict[str, Any] | None) -> str:
    """This stage against the one before it."""
    at = ORDER.index(stage)
    if at == 0:
        return (
            "The first stage has nothing before it: read it whole, in the order that its `README.md` gives.\n"
        )
    before = ORDER[at - 1]
    if facts is None or not (repo / "stages" / before / "stage.toml").is_file():
        which = stage if facts is None else before
        return not_yet(f"`{which}` is not built yet; the diff from `{before}` to `{stage}` will stand here.")
    diffs, reasons = fold(repo / "stages" / before, repo / "stages" / stage), facts.get("changed", {})
    lesson = render_fragment([diff for diff in diffs if not is_aside(diff.path)], reasons)
    others = [diff for diff in diffs if is_aside(diff.path) and diff.kind != "identical"]
    html = lesson
    if others:
        what = "exports, the Triton twins of kernels in plain PyTorch, FlashInfer"
        html += (
            f'<details class="aside"><summary>{len(others)} files that say the same once more: {what}'
            f"</summary>\n"
            f"{render_fragment(others, reasons)}</details>\n"
        )
    # Closed: the table above the files says what there is, and a page opens quickly.
    html = html.replace('<details class="file" open>', '<details class="file">')
    lead = f"Against `{before}`, by functions: what is as it was takes one line, and so does what only moved."
    lead += f" In the terminal: `fledge stages diff {before} {stage}`."
    return f"{lead}\n\nRead these first:\n\n{reading_order(repo, stage)}\n\n{html}"


def is_aside(path: str) -> bool:
    """Whether a file is no part of the lesson: it exports, or does what another does with other means."""
    return path.endswith("__init__.py") or "flashinfer" in path or path.startswith("kernels/triton/")


def reading_order(repo: Path, stage: str, most: int = 5) -> str:
    """The first items of the list in a stage's README. Raises Problem where there is none."""
    path = repo / "stages" / stage / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    listed = text.partition("Read it in this order:\n\n")[2].partition("\n\n")[0]
    items = re.split(r"^(?=\d+\. )", listed, flags=re.MULTILINE)[1 : most + 1]
    if not items:
        raise Problem(f"stages/{stage}/README.md has no list under “Read it in this order:”.")
    return "".join(items).rstrip()


def touched(stage: str, ledger: LedgerHistory) -> str:
    """The files that upstream's commit changed, from the ledger; its diff where the reader has a clone."""
    commit = UPSTREAM[stage]
    try:
        found = ledger.commit(commit)
    except UpstreamError as error:
        raise Problem(str(error)) from None
    rows = [
        [f"`{change.path}`", f"+{change.added or 0}", f"−{change.removed or 0}"] for change in found.files
    ]
    head = (
        f"Upstream's {history.commit_link(found.hash)} (#{found.pull}, {found.day}) changed "
        f"{len(found.files)} file{'s' * (len(found.files) != 1)}, +{found.added:,} −{found.removed:,}. "
        f"The diff itself: `fledge upstream diff {found.short}`.\n\n"
    )
    return f"{head}{table(['file', 'added', 'removed'], rows)}\n\n{diff_of_a_clone(found.hash)}"


def diff_of_a_clone(commit: str) -> str:
    """Upstream's diff, folded; empty where there is no clone to read it from. It is never committed."""
    try:
        return fold_away("Upstream's diff, from your clone", fence(open_history().diff(commit), "diff"))
    except UpstreamError:  # the ledger keeps no code, or the clone lacks an object
        return ""


def symbols(stage: str, facts: dict[str, Any] | None) -> str:
    """What is new in a stage, beside its place upstream."""
    if facts is None:
        return missing("which of its symbols stands where upstream")
    rows = [
        [
            f"`{entry['here']}`",
            f"`{entry['upstream'].removeprefix(SRT)}`",
            history.commit_link(entry["commit"]),
        ]
        for entry in facts.get("symbols", [])
    ]
    lead = f"New with this stage or rewritten, and where each stands upstream, below `{SRT}`."
    more = f"`fledge upstream map {stage} NAME` puts the two side by side."
    return f"{lead} {more}\n\n{table(['here', 'upstream', 'at'], rows)}"


UPSTREAM = {
    "part1_draft_model": "9c05c6898e262b1f7dd07b1401918be2d48fe4e2",
    "part2_cudagraph_dp": "b0524c3789725642c3dd93323d47b18b9ba77a51",
    "part3_scheduler": "ad20b7957e26f14a91e3052a13b822b8744bd931",
    "part4_worker": "815dce0554793d0788faf4eaacf0c7271c070e95",
    "spec_v2": "20a6c0a63d643825e4be5c809fa685490a25ec0d",
}

# Run it


def run(stage: str, facts: dict[str, Any] | None) -> str:
    """Commands that work in this stage."""
    if facts is None:
        return missing("how to run and test it")
    lines = [
        f'fledge run {stage} --prompt "What is the capital of France?"',
        f"fledge divergence {stage}",
        f'fledge trace {stage} "What is the capital of France?"',
        f"pytest tests/contract --stage {stage}",
    ]
    return "```sh\n" + "\n".join(lines) + "\n```\n"


# What is not here, and what came later


def not_here(facts: dict[str, Any] | None) -> str:
    """Left out on purpose, and what is ours."""
    if facts is None:
        return missing("what it leaves out on purpose")
    parts = []
    if left := facts.get("left_out"):
        rows = [[name.replace("_", " "), reason] for name, reason in left.items()]
        parts.append(table(["left out", "why"], rows))
    if own := facts.get("own"):
        parts.append(
            "Ours, at no commit of upstream's:\n\n" + "\n".join(f"- {entry['what']}" for entry in own)
        )
    return "\n\n".join(parts) or "Nothing is left out beyond what stands below.\n"


def since(facts: dict[str, Any] | None, ledger: LedgerHistory) -> str:
    """What upstream had by then and this stage holds back, and where this stage is ahead."""
    if facts is None:
        return missing("what it holds back and where it is ahead")
    parts = []
    for name, head, lead in (
        ("held_back", "held back", "Upstream had it by then; this stage leaves it for later:"),
        ("ahead", "ahead", "This stage has it; upstream got it later:"),
        ("follow_ups", "rebuilt too", "Commits after the part itself that this stage rebuilds:"),
    ):
        if entries := facts.get(name):
            rows = [
                [entry["what"], ", ".join(commit_of(hash_, ledger) for hash_ in hashes(entry))]
                for entry in entries
            ]
            parts.append(f"{lead}\n\n{table([head, 'upstream'], rows)}")
    return (
        "\n\n".join(parts) or "Nothing: upstream's state and this stage's are the same in what both have.\n"
    )


def hashes(entry: dict[str, Any]) -> list[str]:
    return entry.get("commits") or [entry["commit"]]


def commit_of(commit: str, ledger: LedgerHistory) -> str:
    """Hash, PR and date where the ledger has them."""
    try:
        head = ledger.head(commit)
    except UpstreamError:
        return history.commit_link(commit)
    return f"{history.commit_link(head.hash)} {history.pull_of(head)} {history.day(head.day)}"
