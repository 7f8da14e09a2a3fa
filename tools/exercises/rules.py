"""How an answer of the quiz is recomputed from a history: a clone of upstream, or the recorded ledger.

A question's rule is a table. With `holds`, a list of tests, the recorded answer stands as long as all of them
hold. Else `by` names a function of this module, and the other keys are its arguments:

- a test (TESTS) is put to every choice, which stands where the arguments have "{}"; the one that passes it is
  the answer. `each` gives every choice a test of its own, or a list of them;
- what computes (VALUES) gives the answer itself;
- a key (KEYS) sorts the items of an order.

Paths are those below python/sglang/srt/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime
from typing import Any

from ..upstream.history import SPECULATIVE, History, workers

SRT = "python/sglang/srt/"
WORKER = "speculative/eagle_worker.py"
UTILS = "speculative/eagle_utils.py"
TESTS: dict[str, Callable[..., bool]] = {}
VALUES: dict[str, Callable[..., Any]] = {}
KEYS: dict[str, Callable[..., Any]] = {}


class NoAnswer(Exception):
    """The history answers otherwise than with exactly one of the choices; the message says how."""


def recompute(question: Any, history: History) -> Any:
    """The answer of a `Question`, from `history`: in the form of its kind.

    Raises NoAnswer where the facts no longer give one, and UpstreamError where the history cannot say.
    """
    rule = dict(question.rule)
    if "holds" in rule:
        for test in rule["holds"]:
            if not _passes(history, test):
                raise NoAnswer(f"{question.id}: it does not hold any more that {test}")
        return question.answer
    if "each" in rule:
        tests = [tests if isinstance(tests, list) else [tests] for tests in rule["each"]]
        passed = [all(_passes(history, test) for test in tests) for tests in tests]
        return _only(question, [choice for choice, ok in zip(question.choices, passed, strict=True) if ok])
    name = rule.pop("by")
    if name in TESTS:
        test = {"by": name, **rule}
        return _only(question, [choice for choice in question.choices if _passes(history, test, choice)])
    if name in VALUES:
        return VALUES[name](history, **rule)
    keys = {
        item: KEYS[name](history, of, **rule) for item, of in zip(question.choices, question.of, strict=True)
    }
    if len(set(keys.values())) < len(keys):
        raise NoAnswer(f"{question.id}: two of them are equal")
    return sorted(keys, key=keys.__getitem__)


def what_is_asked(questions: Iterable[Any], history: History) -> list[tuple[str, tuple]]:
    """(method, arguments) of everything that the rules ask of a history."""
    noting = Noting(history)
    for question in questions:
        recompute(question, noting)
    return noting.asked


class Noting:
    """Passes every question on to a history and notes it."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.asked: list[tuple[str, tuple]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.history, name)

        def ask(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return method(*arguments)

        return ask


def _passes(history: History, test: dict[str, Any], choice: str = "") -> bool:
    """`test` of a history, with the choice in place of "{}"."""
    filled = {
        name: value.replace("{}", choice) if isinstance(value, str) else value for name, value in test.items()
    }
    return TESTS[filled.pop("by")](history, **filled)


def _only(question: Any, found: list[str]) -> str:
    if len(found) != 1:
        raise NoAnswer(f"{question.id}: {len(found)} of the choices pass, {found}")
    return found[0]


def _is(kind: dict[str, Callable]) -> Callable[[Callable], Callable]:
    def note(function: Callable) -> Callable:
        kind[function.__name__] = function
        return function

    return note


def _count(history: History, word: str, commit: str, path: str | None, symbol: str | None = None) -> int:
    return history.occurrences(word, commit, path if path is None else SRT + path, symbol)


# Tests


@_is(TESTS)
def says(history: History, word: str, commit: str, path: str, symbol: str | None = None) -> bool:
    """The word stands in the file, or in the definition, at the commit."""
    return _count(history, word, commit, path, symbol) > 0


@_is(TESTS)
def lacks(history: History, word: str, commit: str, path: str, symbol: str | None = None) -> bool:
    return _count(history, word, commit, path, symbol) == 0


@_is(TESTS)
def brings(history: History, word: str, commit: str, path: str, symbol: str | None = None) -> bool:
    """The word stands there at the commit, and did not before it."""
    return says(history, word, commit, path, symbol) and lacks(history, word, commit + "^", path, symbol)


@_is(TESTS)
def drops(history: History, word: str, commit: str, path: str, symbol: str | None = None) -> bool:
    return lacks(history, word, commit, path, symbol) and says(history, word, commit + "^", path, symbol)


@_is(TESTS)
def changes(history: History, word: str, commit: str) -> bool:
    """The word stands in a line that the commit adds or removes."""
    return _count(history, word, commit, None) > 0


@_is(TESTS)
def leaves_out(history: History, word: str, commit: str) -> bool:
    """The word stands in no line that the commit adds or removes."""
    return not changes(history, word, commit)


@_is(TESTS)
def touches(history: History, of: str, commit: str) -> bool:
    """The commit changes a file of that name."""
    return any(("/" + change.path).endswith("/" + of) for change in history.commit(commit).files)


@_is(TESTS)
def leaves(history: History, of: str, commit: str) -> bool:
    """The commit changes no file of that name."""
    return not touches(history, of, commit)


@_is(TESTS)
def alive(history: History, of: str, ref: str) -> bool:
    """A file of that name stands in speculative/."""
    return any(path.endswith("/" + of) for path in history.files(ref, SPECULATIVE))


@_is(TESTS)
def bore(history: History, of: str, path: str) -> bool:
    """The pull request `of` brought the file."""
    return f"#{history.head(_life(history, path).born).pull}" == of


@_is(TESTS)
def has_lines(history: History, commit: str, added: int, removed: int) -> bool:
    """The commit adds and removes so many lines."""
    found = history.commit(commit)
    return (found.added, found.removed) == (added, removed)


# Values


@_is(VALUES)
def lines(history: History, ref: str, path: str) -> int:
    return history.line_count(ref, SRT + path)


@_is(VALUES)
def added(history: History, commit: str, path: str = "") -> int:
    return sum(change.added or 0 for change in history.commit(commit).files if change.path.endswith(path))


@_is(VALUES)
def removed(history: History, commit: str, path: str = "") -> int:
    return sum(change.removed or 0 for change in history.commit(commit).files if change.path.endswith(path))


@_is(VALUES)
def worker_files(history: History, ref: str) -> int:
    return len(workers(history.files(ref, SPECULATIVE)))


@_is(VALUES)
def minutes(history: History, start: str, end: str) -> int:
    """Minutes from one commit on main to the other."""
    first, last = (datetime.fromisoformat(history.head(ref).committed) for ref in (start, end))
    return int((last - first).total_seconds() // 60)


@_is(VALUES)
def months(history: History, start: str, end: str) -> int:
    """Whole months between the days of two commits."""
    first, last = (date.fromisoformat(history.head(ref).day) for ref in (start, end))
    return 12 * (last.year - first.year) + last.month - first.month - (last.day < first.day)


@_is(VALUES)
def opened_first(history: History, commits: list[str]) -> str:
    """The pull request with the lowest number."""
    return f"#{min(history.head(ref).pull for ref in commits)}"


@_is(VALUES)
def new_file(history: History, commit: str) -> str:
    """The name of the only file that a commit brings into speculative/."""
    full = history.head(commit).hash
    found = [life.path for life in history.lives(SPECULATIVE) if life.born == full]
    if len(found) != 1:
        raise NoAnswer(f"{commit} brings {len(found)} files")
    return _name(found[0])


@_is(VALUES)
def became(history: History, path: str) -> str:
    """The name under which a file goes on after it was renamed."""
    if (new := _life(history, path).became) is None:
        raise NoAnswer(f"{path} was never renamed")
    return _name(new)


@_is(VALUES)
def longest(history: History, ref: str) -> str:
    """The longest file of speculative/."""
    return _name(max(history.files(ref, SPECULATIVE), key=lambda path: history.line_count(ref, path)))


@_is(VALUES)
def draft_forwards(history: History, commit: str, steps: int) -> int:
    """Forwards of the draft model in one decode step: those of the loop, which may end before the last one,
    and the draft extend."""
    stops_early = _count(history, "break", commit, WORKER, "EAGLEWorker.draft_forward") > 0
    entry = "EAGLEWorker.forward_batch_speculative_generation"
    return steps - stops_early + _count(history, "extend_after_decode(batch)", commit, WORKER, entry)


@_is(VALUES)
def target_forwards(history: History, commit: str) -> int:
    """Forwards of the target model in one decode step: those of the verification."""
    word = "target_worker.forward_batch_generation("
    return _count(history, word, commit, WORKER, "EAGLEWorker.verify")


@_is(VALUES)
def candidates(history: History, commit: str, steps: int, topk: int) -> int:
    """Scored candidates per request: topk children of the root, then all children of topk beams, or, if only
    the kept beams were recorded, topk of each step."""
    keeps_all = _count(history, "expand_scores,", commit, UTILS, "select_top_k_tokens") > 0
    return topk + (steps - 1) * (topk**2 if keeps_all else topk)


@_is(VALUES)
def draft_slots(history: History, commit: str, bs: int, steps: int, topk: int) -> int:
    """Slots that one draft phase takes, where the page holds one token."""
    words = ("alloc_token_slots", "self.topk", "speculative_num_steps")
    if not all(_count(history, word, commit, WORKER, "EAGLEWorker.draft") for word in words):
        raise NoAnswer("the slots are not taken at once")
    return bs * topk * steps


@_is(VALUES)
def freed_rows(history: History, commit: str, seq_len: int, page: int, n: int, kept: int) -> list[int]:
    """Which of n rows a verification gives back, of which it keeps the first `kept` tokens."""
    first = 0
    rejected = set(range(kept, n))
    if _count(history, "align_evict_mask_to_page_size", commit, UTILS, "EagleVerifyInput.verify"):
        first = (seq_len + kept - 1) // page * page - seq_len
        rejected -= set(range(max(first, 0), min(first + page, n)))
    return sorted(rejected)


@_is(VALUES)
def parent_offset(history: History, commit: str, topk: int, request: int) -> int:
    """What is added to a parent's index for the request with this number in the batch."""
    per_request = _count(history, "step=self.topk", commit, UTILS)
    return request * topk if per_request else 0


@_is(VALUES)
def kept_rows(history: History, commit: str, index: list[int]) -> list[int]:
    """The rows that the draft state keeps when the batch keeps those of `index`."""
    return list(range(len(index))) if _count(history, "len(new_indices)", commit, UTILS) else index


@_is(VALUES)
def reserved_names(history: History, ref: str) -> int:
    """Names that no plug-in may take: the members of the enum, and the alias NEXTN."""
    members = _count(history, " = auto()", ref, "speculative/spec_info.py", "SpeculativeAlgorithm")
    return members + _count(history, '"NEXTN"', ref, "speculative/spec_registry.py")


# Keys


@_is(KEYS)
def merged(history: History, of: str) -> datetime:
    """When the commit came to main."""
    return datetime.fromisoformat(history.head(of).committed)


@_is(KEYS)
def born(history: History, of: str) -> datetime:
    """When the file came to main."""
    return merged(history, _life(history, of).born)


def _life(history: History, path: str) -> Any:
    """The first life of a file in speculative/."""
    for life in history.lives(SPECULATIVE):
        if life.path == SRT + path:
            return life
    raise NoAnswer(f"{path} never lived")


def _name(path: str) -> str:
    return path.rpartition("/")[2]
