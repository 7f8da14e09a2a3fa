"""Upstream's history: what a clone answers, what the ledger answers, and that they answer alike."""

from pathlib import Path

import pytest

from tests.tools.upstream_repos import (
    KERNEL,
    RENAMED,
    TEXT,
    TREE,
    WORKER,
    build,
    commit,
    git,
    named,
    recorded,
    write,
)
from tools.upstream.clone import CloneHistory
from tools.upstream.history import (
    Change,
    History,
    Life,
    NoSuchFile,
    NoSuchRef,
    NotRecorded,
    UpstreamError,
    check_path,
    check_ref,
    printable,
    pull_of,
    workers,
)
from tools.upstream.ledger import LedgerHistory
from tools.upstream.symbols import has_name, python_symbols


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("upstream") / "repo"


@pytest.fixture(scope="module")
def hashes(repo: Path) -> dict[str, str]:
    return build(repo)


@pytest.fixture(scope="module")
def ledger(repo: Path, hashes: dict[str, str]) -> LedgerHistory:
    return recorded(repo, named(hashes))


@pytest.fixture
def clone(repo: Path, ledger: LedgerHistory) -> CloneHistory:
    return CloneHistory(repo, ledger)


@pytest.fixture(params=["clone", "ledger"])
def history(request: pytest.FixtureRequest) -> History:
    return request.getfixturevalue(request.param)


def test_every_kind_of_ref_resolves(history: History, hashes: dict[str, str]) -> None:
    assert history.resolve("v1") == history.resolve("#7") == history.resolve("7") == hashes["change"]
    assert history.resolve("v2") == history.resolve("main") == hashes["drop"]  # v2 is an annotated tag
    assert history.resolve(hashes["add"][:7]) == history.resolve(hashes["add"]) == hashes["add"]


def test_a_commit_has_both_dates_its_pull_request_and_its_files(
    history: History, hashes: dict[str, str]
) -> None:
    found = history.commit("#7")
    assert (found.hash, found.title, found.pull) == (hashes["change"], "Change the worker", 7)
    assert found.subject == "Change the worker (#7)"
    assert (found.author, found.date) == ("A. Author", "2025-01-03T23:30:00-08:00")
    assert (found.committed, found.day) == ("2025-01-03T23:40:00-08:00", "2025-01-03")
    assert found.files == (Change(WORKER, 1, 1), Change(KERNEL, 1, 0))
    assert (found.added, found.removed) == (2, 1)
    assert history.head("#7").files is None


def test_a_rename_counts_as_git_show_counts_it(clone: CloneHistory, ledger: LedgerHistory) -> None:
    assert clone.commit("#30").files == ledger.commit("#30").files == (Change(RENAMED, 1, 1),)


def test_the_first_commit_of_all_has_files(clone: CloneHistory, hashes: dict[str, str]) -> None:
    assert clone.commit(hashes["start"]).files == (Change("README.md", 1, 0),)


def test_files_symbols_and_lengths(history: History) -> None:
    assert history.files("v1") == [TREE, WORKER]
    assert history.files("v2") == workers(history.files("v2")) == [RENAMED]
    names = [
        (symbol.name, symbol.kind, symbol.first, symbol.last) for symbol in history.symbols("v1", WORKER)
    ]
    assert names == [
        ("Worker", "class", 4, 10),
        ("Worker.draft", "def", 5, 6),
        ("Worker.size", "def", 8, 10),
        ("helper", "def", 15, 16),
    ]
    assert history.line_count("v1", WORKER) == len(TEXT.splitlines())


def test_births_deaths_and_renames(history: History, hashes: dict[str, str]) -> None:
    assert history.lives() == [
        Life(TREE, hashes["add"], hashes["drop"], None),
        Life(WORKER, hashes["add"], hashes["rename"], RENAMED),
        Life(RENAMED, hashes["rename"]),
    ]


def test_the_log_of_a_path_ends_at_what_was_recorded(history: History, hashes: dict[str, str]) -> None:
    assert [commit.hash for commit in history.commits(WORKER)] == [
        hashes[n] for n in ("add", "change", "rename")
    ]


def test_an_absent_baseline_is_stood_in_for(history: History, hashes: dict[str, str]) -> None:
    assert history.resolve("29f6d408c0") == hashes["drop"]
    assert "stands in" in history.note("29f6d408c0") and hashes["drop"][:10] in history.note("29f6d408c0")
    assert history.note("v1") is None


def test_only_a_clone_has_text_diffs_and_parents(
    clone: CloneHistory, ledger: LedgerHistory, hashes: dict[str, str]
) -> None:
    assert clone.text("#12", WORKER) == TEXT
    assert "\n+        return 11\n" in clone.diff("#7", WORKER) and KERNEL not in clone.diff("#7", WORKER)
    assert clone.resolve("#7^") == hashes["add"] and clone.text("v1^", WORKER) == TEXT
    for ask in (
        lambda: ledger.text("#12", WORKER),
        lambda: ledger.diff("#7"),
        lambda: ledger.resolve("#7^"),
        lambda: ledger.commit("#99"),
        lambda: ledger.files("v1", "python"),
        lambda: ledger.symbols("v1", "setup.py"),
        lambda: ledger.commits(TREE),
    ):
        with pytest.raises(NotRecorded, match="fledge upstream fetch"):
            ask()


def test_what_is_not_there_is_said(clone: CloneHistory, hashes: dict[str, str]) -> None:
    for ref in ("v9", "#99", "0123456789", hashes["start"] + "^"):
        with pytest.raises(NoSuchRef):
            clone.resolve(ref)
    with pytest.raises(NoSuchFile):
        clone.text("v2", WORKER)
    assert clone.files("v1", "nowhere") == []
    assert clone.commits("python/*") == clone.lives("python/*") == []  # a path, not a pattern


def test_a_fork_is_asked_for_upstreams_main_and_not_for_its_own(
    repo: Path, ledger: LedgerHistory, hashes: dict[str, str], tmp_path: Path
) -> None:
    fork = tmp_path / "fork"
    git(tmp_path, "clone", "--quiet", str(repo), str(fork))
    git(fork, "switch", "--quiet", "--detach", "v1")
    write(fork, "own.txt", "own\n")
    git(fork, "branch", "--force", "main", commit(fork, "Our own (#31)", "2025-04-01"))
    history = CloneHistory(fork, ledger)
    assert history.resolve("main") == hashes["drop"]
    assert history.resolve("#31") == hashes["drop"]


def test_a_working_tree_of_a_clone_is_the_same_clone(
    repo: Path, ledger: LedgerHistory, tmp_path: Path
) -> None:
    git(repo, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"), "v1")
    try:
        assert CloneHistory(tmp_path / "tree", ledger).files("v2") == [RENAMED]
    finally:
        git(repo, "worktree", "remove", "--force", str(tmp_path / "tree"))
    with pytest.raises(UpstreamError, match="no git repository"):
        CloneHistory(tmp_path)


def test_a_commit_graph_that_lies_is_not_read(repo: Path, ledger: LedgerHistory, tmp_path: Path) -> None:
    """A file beside the objects, without a hash over it that git would check: here no commit has a parent."""
    git(tmp_path, "clone", "--quiet", "--bare", "--no-local", str(repo), "copy.git")
    git(tmp_path / "copy.git", "commit-graph", "write", "--reachable")
    graph = tmp_path / "copy.git" / "objects" / "info" / "commit-graph"
    graph.chmod(0o644)
    lie = bytearray(graph.read_bytes())
    data = next(
        int.from_bytes(lie[at + 4 : at + 12])
        for at in range(8, 8 + 12 * lie[6], 12)
        if lie[at : at + 4] == b"CDAT"
    )
    for entry in range(data, data + 5 * 36, 36):  # tree, two parents, dates
        lie[entry + 20 : entry + 28] = bytes.fromhex("7000000070000000")
    graph.write_bytes(lie)
    assert git(tmp_path / "copy.git", "rev-list", "--count", "main") == "1"  # git believes it
    assert len(CloneHistory(tmp_path / "copy.git", ledger).commits()) == 5


@pytest.mark.parametrize(
    "ref", ["--all", "-x", "", "a..b", "v1^^", "v1~2", "HEAD:x", "v1 v2", "a\nb", "@{u}", "^v1"]
)
def test_what_git_could_read_otherwise_is_no_ref(ref: str) -> None:
    with pytest.raises(NoSuchRef, match="is no ref"):
        check_ref(ref)


@pytest.mark.parametrize("path", ["--output=x", "/etc/passwd", "a/../b", ":(top)x", "a\x1bb", "a\0b", ""])
def test_what_git_could_read_otherwise_is_no_path(path: str) -> None:
    with pytest.raises(UpstreamError, match="is no path"):
        check_path(path)


def test_titles_and_pull_requests() -> None:
    assert pull_of('Revert "Add (#12)" (#13)') == ('Revert "Add (#12)"', 13)
    assert pull_of("Add (#12) again") == ("Add (#12) again", None)
    assert printable("a\x1b[31mb\u202ec\n\td") == "a\\x1b[31mb\\u202ec\n\td"


def test_symbols_are_found_in_any_language() -> None:
    assert has_name("__global__ void verify_tree_greedy()", "verify_tree_greedy")
    assert not has_name("verify_tree_greedy_v2", "verify_tree_greedy")
    assert [symbol.name for symbol in python_symbols("try:\n  def a(): pass\nexcept E:\n  b = '\\d'\n")] == [
        "a"
    ]
    enum = python_symbols("class E:\n    A = auto()\n    B: int = 2\n    a, b = 1, 2\nC = 3\n")
    assert [(s.name, s.kind, s.first) for s in enum] == [
        ("E", "class", 1),
        ("E.A", "name", 2),
        ("E.B", "name", 3),
    ]
    with pytest.raises(UpstreamError, match="cannot parse"):
        python_symbols("def (")
