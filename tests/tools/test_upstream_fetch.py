"""`fledge upstream fetch`: how often it asks the server, what it keeps, and what it says."""

import zipfile
from pathlib import Path

import pytest

from tests.tools.upstream_repos import (
    SPECULATIVE,
    TREE,
    WORKER,
    build,
    commit,
    git,
    named,
    recorded,
    write,
)
from tools.upstream import fetch as fetching
from tools.upstream import source
from tools.upstream.check import PROVEN, check
from tools.upstream.claims import Claim
from tools.upstream.clone import CloneHistory
from tools.upstream.fetch import fetch_clone, fetch_wheel
from tools.upstream.history import MissingObject, UpstreamError
from tools.upstream.ledger import LedgerHistory
from tools.upstream.named import Named
from tools.upstream.quiet_git import QuietGit

pytestmark = pytest.mark.slow

UNNAMED = f"{SPECULATIVE}/notes.txt"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "repo"


@pytest.fixture
def hashes(repo: Path) -> dict[str, str]:
    hashes = build(repo)
    write(repo, "unnamed.py", "nobody = 'names this'\n")
    hashes["unnamed"] = commit(repo, "Unnamed (#50)", "2025-05-01")
    return hashes


@pytest.fixture
def what(hashes: dict[str, str]) -> Named:
    symbols = [{"here": "a.py:a", "upstream": f"{WORKER}:Worker", "commit": hashes["change"]}]
    has = {"commit": "v1", "path": "README.md", "has": "upstream"}  # no named commit changes it
    claim = Claim("page", "readme", "It says so.", "git", has)
    return named(hashes, [claim], symbols=symbols)


@pytest.fixture
def ledger(repo: Path, what: Named) -> LedgerHistory:
    return recorded(repo, what)


class Asked:
    """What was fetched: the words and the standard input of every `git fetch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetches: list[bytes] = []
        watched = fetching._watched

        def count(git, watch, stdin, *words):
            self.fetches.append(stdin)
            watched(git, watch, stdin, *words)

        monkeypatch.setattr(fetching, "_watched", count)
        started = QuietGit.start

        def start(git, *words):
            assert "fetch" not in words or len(self.fetches) > 0, "a fetch by another way"
            return started(git, *words)

        monkeypatch.setattr(QuietGit, "start", start)

    @property
    def of_blobs(self) -> list[bytes]:
        return [stdin for stdin in self.fetches if not stdin.startswith(b"+refs/")]


def bring(repo: Path, what: Named, ledger: LedgerHistory, *more: str, url: str | None = None) -> CloneHistory:
    return fetch_clone(url or f"file://{repo}", more, what, ledger, lambda text: None, lambda *progress: None)


def test_contents_come_in_one_fetch_and_reading_asks_for_none(
    repo: Path, what: Named, ledger: LedgerHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    history = bring(repo, what, ledger)
    assert len(asked.of_blobs) == 1 and len(asked.fetches) == 3  # v1, main and all tags, contents
    repo.rename(tmp_path / "moved")  # no server any more
    assert {fact.state for fact in check(history, None, ledger, what)} == {PROVEN}
    assert len(asked.fetches) == 3


def test_only_what_is_named_is_fetched(
    repo: Path, hashes: dict[str, str], what: Named, ledger: LedgerHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = bring(repo, what, ledger)
    assert git(repo, "rev-parse", "main:unnamed.py") not in history.present()
    with pytest.raises(MissingObject, match="Run: fledge upstream fetch #50"):
        history.text("#50", "unnamed.py")
    asked = Asked(monkeypatch)
    history = bring(repo, what, ledger, "#50")
    assert len(asked.of_blobs) == 1 and history.text("#50", "unnamed.py") == "nobody = 'names this'\n"
    assert history.commit("#50").added == 1


def test_a_second_fetch_brings_what_is_new_and_no_contents_again(
    repo: Path, what: Named, ledger: LedgerHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(repo, what, ledger)
    new = commit(repo, "New (#60)", "2025-06-01")
    asked = Asked(monkeypatch)
    assert bring(repo, what, ledger).resolve("main") == new
    assert asked.of_blobs == [] and len(asked.fetches) == 1


def test_an_interrupted_fetch_goes_on_where_it_was(
    repo: Path, what: Named, ledger: LedgerHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = fetching._watched

    def interrupted(git, watch, stdin, *words):
        if b"refs/heads/main" in stdin:
            raise KeyboardInterrupt
        watched(git, watch, stdin, *words)

    monkeypatch.setattr(fetching, "_watched", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bring(repo, what, ledger)
    assert source.remembered("clone") is None  # half a clone is in nobody's way
    monkeypatch.setattr(fetching, "_watched", watched)
    asked = Asked(monkeypatch)
    bring(repo, what, ledger)
    assert not [stdin for stdin in asked.fetches if stdin == b"+refs/tags/v1:refs/tags/v1\n"]
    assert isinstance(source.open_history(), CloneHistory)


def test_a_lost_connection_is_a_sentence_and_keeps_what_came(
    repo: Path, what: Named, ledger: LedgerHistory, tmp_path: Path
) -> None:
    with pytest.raises(
        UpstreamError, match="git ls-remote said: fatal: .*does not appear to be a git repository"
    ):
        bring(repo, what, ledger, url=f"file://{tmp_path}/nowhere")
    bring(repo, what, ledger)
    before = source.remembered("clone")
    git(repo, "branch", "-m", "main", "trunk")
    with pytest.raises(UpstreamError, match="has no branch main"):
        bring(repo, what, ledger)
    assert source.remembered("clone") == before and CloneHistory(before, ledger).files("v1") == [TREE, WORKER]


def test_a_clone_on_this_machine_is_used_in_place_and_left_alone(
    repo: Path, what: Named, ledger: LedgerHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in repo.rglob("*")}
    history = bring(repo, what, ledger, url=str(repo))
    assert {fact.state for fact in check(history, None, ledger, what)} == {PROVEN}
    assert asked.fetches == [] and {path: path.stat().st_mtime_ns for path in repo.rglob("*")} == before
    assert source.open_history().path == repo.resolve()
    with pytest.raises(UpstreamError, match="only read"):
        bring(repo, what, ledger, "#50", url=str(repo))


def test_a_partial_clone_of_the_readers_says_which_remote_has_it(
    repo: Path, what: Named, ledger: LedgerHistory, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:none", f"file://{repo}", "partial.git")
    history = bring(repo, what, ledger, url=str(tmp_path / "partial.git"))
    with pytest.raises(MissingObject, match=f"its remote origin \\(file://{repo}\\) has it. Fetch it there"):
        history.text("v1", WORKER)


def test_a_clone_of_something_else_is_refused(
    what: Named, ledger: LedgerHistory, repo: Path, tmp_path: Path
) -> None:
    build(tmp_path / "other", worker="x = 1\n")
    for path in git(tmp_path / "other", "for-each-ref", "--format=%(refname)").split():
        git(tmp_path / "other", "update-ref", "-d", path)
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet", "--bare")
    with pytest.raises(UpstreamError, match="has none of the"):
        bring(repo, what, ledger, url=str(tmp_path / "empty"))
    with pytest.raises(UpstreamError, match="no git repository"):
        bring(repo, what, ledger, url=str(tmp_path / "nowhere"))
    assert source.remembered("clone") is None


def test_without_a_clone_and_with_a_lost_one_the_ledger_answers(repo: Path, tmp_path: Path) -> None:
    assert source.open_history().label == "the recorded ledger"
    (tmp_path / "gone").mkdir()
    source.remember("clone", tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "gone" in source.open_history().label and source.open_wheel() is None


def make_wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(
            "sglang/srt/arg_groups/field_order.py", 'ORDER = (\n    "model_path",\n    "device",\n)\n'
        )
        for name, text in files.items():
            made.writestr(f"sglang/srt/speculative/{name}.py", text)
    return path


def test_a_wheel_is_read_as_a_zip(repo: Path, ledger: LedgerHistory, tmp_path: Path) -> None:
    text = "raise SystemExit('imported')\n\nclass A:\n    def b(self): pass\n"
    path = make_wheel(tmp_path / "sglang-9.9-py3-none-any.whl", a_worker=text)
    wheel = fetch_wheel(path, ledger, lambda text: None)
    assert source.open_wheel().files() == ["sglang/srt/speculative/a_worker.py"]
    assert [symbol.name for symbol in wheel.symbols("sglang/srt/speculative/a_worker.py")] == ["A", "A.b"]
    assert (wheel.version, wheel.flags) == ("9.9", ["model_path", "device"])
    for bad in (tmp_path / "none.whl", make_wheel(tmp_path / "other-1-py3-none-any.whl"), repo):
        with pytest.raises(UpstreamError, match="is no wheel"):
            fetch_wheel(bad, ledger, lambda text: None)


def test_a_changed_wheel_is_refused(repo: Path, tmp_path: Path) -> None:
    known = LedgerHistory.load()
    path = make_wheel(tmp_path / known.wheel.name)
    with pytest.raises(UpstreamError, match="SHA-256"):
        fetch_wheel(path, known, lambda text: None)
    assert source.open_wheel() is None
