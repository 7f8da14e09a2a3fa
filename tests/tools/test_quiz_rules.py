"""What the quiz's rules recompute from a built repository, and from one in which a fact is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.tools.upstream_repos import commit, git, write
from tools.exercises.questions import Question, read_questions
from tools.exercises.rules import KEYS, SRT, TESTS, UTILS, VALUES, WORKER, NoAnswer, recompute, what_is_asked
from tools.upstream.clone import CloneHistory
from tools.upstream.history import Change, Commit, Life, UpstreamError
from tools.upstream.ledger import LedgerHistory

SPEC_INFO, REGISTRY = "speculative/spec_info.py", "speculative/spec_registry.py"
ENUM = "class SpeculativeAlgorithm:\n    EAGLE = auto()\n    NEXTN = auto()\n"
LOOP = """\
class EAGLEWorker(TpModelWorker):
    def forward_batch_speculative_generation(self, batch):
        self.draft(batch)
        self.verify(batch)
        self.forward_draft_extend_after_decode(batch)

    def draft(self, batch):
        batch.alloc_token_slots(num_seqs * self.topk * self.speculative_num_steps)
        batch.restore_state(backup)

    def draft_forward(self):
        for i in range(steps):
            pass

    def verify(self, batch):
        self.target_worker.forward_batch_generation(batch)
"""
BREAK = LOOP.replace("            pass\n", "            if i == steps - 1:\n                break\n")
TREE = """\
class EagleVerifyInput:
    def verify(self):
        align_evict_mask_to_page_size[grid](mask)

    def filter_batch(self, new_indices):
        self.verified_id = self.verified_id[: len(new_indices)]
        offset = torch.arange(0, batch.batch_size() * self.topk, step=self.topk)


def select_top_k_tokens():
    return (expand_scores, topk_index)
"""


class Repo:
    """Four commits; `edits` are (old, new) pairs applied to every text, title and day in them."""

    def __init__(self, folder: Path, *edits: tuple[str, str]):
        self.edits = edits
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
        self.folder = folder
        self.put("Start (#5)", "2025-01-01", {SPEC_INFO: ENUM, "models/llama.py": "del self.norm\n"})
        self.put("Worker (#3)", "2025-01-02", {WORKER: LOOP, UTILS: TREE})
        last = {
            WORKER: BREAK,
            SPEC_INFO: ENUM.replace("    NEXTN = auto()\n", ""),
            REGISTRY: 'frozenset({"NEXTN"})\n',
        }
        self.put("Stop early (#7)", "2025-03-05", last)
        self.put(
            "Look ahead (#9)", "2025-04-01", {"speculative/lookahead_worker.py": "a = 1\nb = 2\nc = 3\n"}
        )
        old, new = (
            self.edited(f"python/sglang/srt/speculative/{name}_worker.py") for name in ("lookahead", "ngram")
        )
        git(folder, "mv", old, new)
        commit(folder, self.edited("Another name (#10)"), "2025-04-02")

    def put(self, title: str, day: str, files: dict[str, str]) -> None:
        for path, text in files.items():
            write(self.folder, SRT + self.edited(path), self.edited(text))
        commit(self.folder, self.edited(title), self.edited(day))

    def edited(self, text: str) -> str:
        for old, new in self.edits:
            text = text.replace(old, new)
        return text

    @property
    def history(self) -> CloneHistory:
        return CloneHistory(self.folder)


def question(rule: dict[str, Any], **fields: Any) -> Question:
    kind = {
        "id": "q",
        "page": "p",
        "asks": "?",
        "kind": "file",
        "answer": None,
        "hint": "",
        "shows": "",
        "because": "",
    }
    return Question(**kind | fields, rule=rule)


def choice(*choices: str, **rule: Any) -> Question:
    return question(rule, kind="choice", choices=choices)


def order(*pairs: tuple[str, str], **rule: Any) -> Question:
    items, of = zip(*pairs, strict=True)
    return question(rule, kind="order", choices=items, of=of)


FORWARD = {"path": WORKER, "symbol": "EAGLEWorker.draft_forward"}
RULES: list[tuple[Question, Any, tuple[str, str], Any]] = [
    # question, its answer, a fact that is altered, the answer then (None: there is no answer any more)
    (
        choice("norm", "attn", by="says", word="del self.{}", commit="#5", path="models/llama.py"),
        "norm",
        ("norm", "attn"),
        "attn",
    ),
    (
        choice("NEXTN", "EAGLE", by="lacks", word="{} = auto()", commit="#7", path=SPEC_INFO),
        "NEXTN",
        ("EAGLE =", "NONE ="),
        None,
    ),
    (
        choice("#3", "#7", by="brings", word="break", commit="{}", **FORWARD),
        "#7",
        ("            pass\n", "            break\n"),
        "#3",
    ),
    (
        choice("NEXTN", "EAGLE", by="drops", word="{} = auto()", commit="#7", path=SPEC_INFO),
        "NEXTN",
        ("    NEXTN = auto()\n", ""),
        None,
    ),
    (choice("break", "free", by="changes", word="{}", commit="#7"), "break", ("break", "free"), "free"),
    (choice("break", "free", by="leaves_out", word="{}", commit="#7"), "free", ("break", "free"), "break"),
    (
        choice("llama.py", "eagle_utils.py", by="touches", of="{}", commit="#5"),
        "llama.py",
        ("Start (#5)", "Start (#50)"),
        None,
    ),
    (
        choice("eagle_worker.py", "eagle_utils.py", by="leaves", of="{}", commit="#7"),
        "eagle_utils.py",
        ("            if i == steps - 1:\n                break\n", "            pass\n"),
        None,
    ),
    (
        choice("ngram_worker.py", "lookahead_worker.py", by="alive", of="{}", ref="main"),
        "ngram_worker.py",
        ("ngram", "lookup"),
        None,
    ),
    (choice("#3", "#7", by="bore", of="{}", path=WORKER), "#3", ("(#3)", "(#7)"), "#7"),
    (
        question({"holds": [{"by": "has_lines", "commit": "#9", "added": 3, "removed": 0}]}, answer="x"),
        "x",
        ("c = 3\n", ""),
        None,
    ),
    (question({"by": "lines", "ref": "#7", "path": REGISTRY}), 1, ('"NEXTN"})\n', '"NEXTN"})\n\n'), 2),
    (
        question({"by": "added", "commit": "#3", "path": "eagle_worker.py"}),
        16,
        ("        self.draft(batch)\n", ""),
        15,
    ),
    (question({"by": "removed", "commit": "#7"}), 2, ("    NEXTN = auto()\n", ""), 1),
    (question({"by": "worker_files", "ref": "main"}), 2, ("ngram_worker", "ngram"), 1),
    (question({"by": "minutes", "start": "#5", "end": "#3"}), 1440, ("2025-01-02", "2025-01-03"), 2880),
    (question({"by": "months", "start": "#3", "end": "#7"}), 2, ("2025-03-05", "2025-03-01"), 1),
    (
        question({"by": "opened_first", "commits": ["#5", "#3", "#7"]}),
        "#3",
        ("Start (#5)", "Start (#2)"),
        None,
    ),
    (
        question({"by": "new_file", "commit": "#7"}),
        "spec_registry.py",
        ("spec_registry", "methods"),
        "methods.py",
    ),
    (
        question({"by": "became", "path": "speculative/lookahead_worker.py"}),
        "ngram_worker.py",
        ("ngram", "lookup"),
        "lookup_worker.py",
    ),
    (
        question({"by": "longest", "ref": "#3"}),
        "eagle_worker.py",
        ("NEXTN = auto()\n", "NEXTN = auto()\n" * 20),
        "spec_info.py",
    ),
    (
        question({"by": "draft_forwards", "commit": "#3", "steps": 3}),
        4,
        ("            pass", "            break"),
        3,
    ),
    (
        question({"by": "draft_forwards", "commit": "#7", "steps": 3}),
        3,
        ("extend_after_decode(batch)", "extend(batch)"),
        2,
    ),
    (question({"by": "target_forwards", "commit": "#3"}), 1, ("self.target_worker", "self.worker"), 0),
    (
        question({"by": "candidates", "commit": "#3", "steps": 3, "topk": 4}),
        36,
        ("(expand_scores, ", "("),
        12,
    ),
    (
        question({"by": "draft_slots", "commit": "#3", "bs": 2, "steps": 3, "topk": 4}),
        24,
        ("self.topk * ", ""),
        None,
    ),
    (
        question({"by": "freed_rows", "commit": "#3", "seq_len": 10, "page": 4, "n": 6, "kept": 3}),
        [],
        ("align_evict", "evict"),
        [3, 4, 5],
    ),
    (
        question({"by": "freed_rows", "commit": "#3", "seq_len": 9, "page": 4, "n": 8, "kept": 2}),
        [3, 4, 5, 6, 7],
        ("align_evict", "evict"),
        [2, 3, 4, 5, 6, 7],
    ),
    (
        question({"by": "parent_offset", "commit": "#3", "topk": 4, "request": 2}),
        8,
        (", step=self.topk", ""),
        0,
    ),
    (
        question({"by": "kept_rows", "commit": "#3", "index": [0, 2]}),
        [0, 1],
        ("[: len(new_indices)]", "[new_indices]"),
        [0, 2],
    ),
    (
        question({"by": "reserved_names", "ref": "main"}),
        2,
        ("    EAGLE = auto()\n", "    EAGLE = auto()\n    NONE = auto()\n"),
        3,
    ),
    (order(("a", "#7"), ("b", "#3"), by="merged"), ["b", "a"], ("2025-01-02", "2025-06-01"), ["a", "b"]),
    (order(("r", REGISTRY), ("w", WORKER), by="born"), ["w", "r"], ("2025-01-02", "2025-06-01"), ["r", "w"]),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CloneHistory:
    return Repo(tmp_path_factory.mktemp("quiz") / "repo").history


@pytest.mark.parametrize("case", RULES, ids=[str(case[0].rule.get("by", "holds")) for case in RULES])
def test_a_rule_answers_by_the_facts(case, whole: CloneHistory, tmp_path: Path) -> None:
    asked, answer, edit, altered = case
    assert recompute(asked, whole) == answer
    other = Repo(tmp_path / "repo", edit).history
    if altered is not None:
        assert recompute(asked, other) == altered
    else:
        with pytest.raises((NoAnswer, UpstreamError)):
            recompute(asked, other)


def test_every_rule_is_tried() -> None:
    tried = {asked.rule.get("by", "has_lines") for asked, *_ in RULES}
    assert tried == {*TESTS, *VALUES, *KEYS}


# The recorded questions


class Altered:
    """The ledger with the answer to one question, its `at`-th, turned into another."""

    def __init__(self, real: LedgerHistory, at: int):
        self.real, self.left = real, at

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*asked: Any) -> Any:
            found, self.left = getattr(self.real, name)(*asked), self.left - 1
            return found if self.left != -1 else other(found)

        return ask


def other(found: Any) -> Any:
    """A word that is there is not, and the reverse; what was early is late; every name and number differs."""
    if isinstance(found, Commit):
        files = found.files and tuple(
            Change(f"{x.path}x", (x.added or 0) + 1, (x.removed or 0) + 1) for x in found.files
        )
        date, committed = (mirrored(day) for day in (found.date, found.committed))
        return replace(found, pull=-(found.pull or 0), date=date, committed=committed, files=files)
    if isinstance(found, int):
        return 0 if found else 1
    if found and isinstance(found[0], Life):
        return [replace(life, path=f"{life.path}x", born="0" * 40) for life in found]
    return [f"{path}x" for path in found]


def mirrored(day: str) -> str:
    pivot = datetime(2027, 1, 1, tzinfo=UTC)
    return (pivot - (datetime.fromisoformat(day) - pivot)).isoformat()


@pytest.mark.parametrize("asked", read_questions(), ids=lambda asked: asked.id)
def test_the_ledger_gives_the_recorded_answer_and_an_altered_one_does_not(asked: Question) -> None:
    ledger = LedgerHistory.load()
    assert recompute(asked, ledger) == asked.answer
    facts = len(what_is_asked([asked], ledger))
    changed = [at for at in range(facts) if answer_or_none(asked, Altered(ledger, at)) != asked.answer]
    assert changed, "whatever the history says, this is the answer"
    if "holds" in asked.rule:
        assert len(changed) == facts, "one of its facts is not needed"


def answer_or_none(asked: Question, history: Any) -> Any:
    try:
        return recompute(asked, history)
    except (NoAnswer, UpstreamError, ValueError):
        return None  # what would be asked next was never recorded, or there is nothing to choose from


def test_what_the_questions_are() -> None:
    questions = read_questions()
    assert len(questions) >= 40 and sum(asked.count for asked in questions) <= 10
    known = {asked.id: asked.answer for asked in questions}
    chapter = (known["chapter-forwards"], known["chapter-candidates"], known["chapter-methods"])
    assert chapter == (3, 36, 10) and "IDLE" not in known["part2-hang"] and "eagerly" in known["part2-hang"]
    assert "cannot start" in known["part3-eagle"]
