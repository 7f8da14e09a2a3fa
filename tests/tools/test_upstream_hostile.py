"""A clone that is full of traps: nothing in it runs, nothing in it or around it changes an answer."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.upstream_repos import TREE, WORKER, build, commit, git, named, recorded, write
from tools.cli import app
from tools.upstream import source
from tools.upstream.check import PROVEN, check
from tools.upstream.clone import CloneHistory
from tools.upstream.fetch import fetch_clone
from tools.upstream.history import SPECULATIVE, Change, MissingObject, NoSuchRef, UpstreamError
from tools.upstream.ledger import LedgerHistory
from tools.upstream.named import Named

pytestmark = pytest.mark.slow


class Traps:
    """Programs that leave a file when they run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sprung_in = folder / "traps", folder / "sprung"
        self.folder.mkdir()
        self.sprung_in.mkdir()

    def program(self, name: str, where: Path | None = None) -> str:
        path = where or self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch '{self.sprung_in / name}'\nexit 1\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    @property
    def sprung(self) -> set[str]:
        return {path.name for path in self.sprung_in.iterdir()}


@pytest.fixture
def traps(tmp_path: Path) -> Traps:
    return Traps(tmp_path)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def hashes(repo: Path) -> dict[str, str]:
    return build(repo)


@pytest.fixture
def what(hashes: dict[str, str]) -> Named:
    return named(hashes)


@pytest.fixture
def ledger(repo: Path, what: Named) -> LedgerHistory:
    """What the repository holds before anybody puts a trap into it."""
    return recorded(repo, what)


def arm(repo: Path, traps: Traps) -> None:
    """Every way that git knows for a repository to name a program."""
    inside = repo / ".git"
    for hook in ("reference-transaction", "post-checkout", "post-index-change", "fsmonitor-watchman"):
        traps.program(f"hook-{hook}", inside / "hooks" / hook)
    for key in (
        "core.fsmonitor core.pager pager.log core.sshCommand core.gitProxy core.editor core.askPass "
        "core.alternateRefsCommand diff.external diff.trap.textconv diff.trap.command filter.trap.clean "
        "filter.trap.smudge gpg.program credential.helper uploadpack.packObjectsHook"
    ).split():
        git(repo, "config", key, traps.program(key))
    git(repo, "config", "core.hooksPath", str(inside / "hooks"))
    git(repo, "config", "log.showSignature", "true")
    for word in ("rev-list", "diff-tree", "ls-tree", "cat-file"):
        git(repo, "config", f"alias.{word}", "!" + traps.program(f"alias-{word}"))
    write(inside, "info/attributes", "* diff=trap filter=trap\n")
    write(inside, ".gitattributes", "* diff=trap filter=trap\n")


def ask_everything(history: CloneHistory, ledger: LedgerHistory, what: Named) -> None:
    facts = check(history, None, ledger, what)
    assert {fact.state for fact in facts} == {PROVEN}, [fact for fact in facts if fact.state != PROVEN]
    assert "+        return 11" in history.diff("#7")


def test_the_traps_work(repo: Path, hashes: dict[str, str], traps: Traps) -> None:
    """Else the tests below prove nothing: git as people use it steps into them."""
    arm(repo, traps)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for words in (["status"], ["diff", "v1^", "v1"], ["log", "-p"], ["log", "-p", "--show-signature"]):
        subprocess.run(["git", *words], cwd=repo, env=clean, capture_output=True, check=False)
    assert {"core.fsmonitor", "diff.trap.command", "diff.trap.textconv"} <= traps.sprung


def test_nothing_in_a_clone_runs(
    repo: Path, what: Named, ledger: LedgerHistory, traps: Traps, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(repo, traps)
    traps.program("git-in-the-clone", repo / ".git" / "git")
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(repo)
    ask_everything(CloneHistory(repo, ledger), ledger, what)
    assert traps.sprung == set()


def test_a_signed_commit_calls_no_program(repo: Path, hashes: dict[str, str], traps: Traps) -> None:
    body = git(repo, "cat-file", "commit", hashes["drop"])
    head, _, message = body.partition("\n\n")
    signed = (
        f"{head}\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----\n\n{message}\n"
    )
    (repo / "signed").write_text(signed)
    full = git(repo, "hash-object", "-t", "commit", "-w", "signed")
    git(repo, "update-ref", "refs/tags/signed", full)
    arm(repo, traps)
    history = CloneHistory(repo)
    assert history.commit("signed").pull == 31 and history.commits(until="signed") and history.diff("signed")
    assert traps.sprung == set()
    git(repo, "-c", "core.fsmonitor=", "log", "-1", "tags/signed", "--")
    assert traps.sprung == {"gpg.program"}  # as git's own log does


def test_a_missing_object_is_not_fetched_by_any_protocol(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, traps: Traps
) -> None:
    """A partial clone whose remote is a program, or another folder: git would ask it for the blob."""
    blob = git(repo, "rev-parse", f"v1:{WORKER}")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    git(repo, "config", "core.repositoryFormatVersion", "1")
    git(repo, "config", "extensions.partialClone", "origin")
    git(repo, "config", "remote.origin.promisor", "true")
    program = traps.program("transport")
    for url in (f"ext::{program}", f"file://{repo}", "https://user:secret@example.org/x.git"):
        git(repo, "config", "remote.origin.url", url)
        git(repo, "config", "remote.origin.uploadpack", program)
        history = CloneHistory(repo, ledger)
        for ask in (
            lambda history: history.text("v1", WORKER),
            lambda history: history.commit("#7"),
            lambda history: history.diff("v1"),
        ):
            with pytest.raises(MissingObject, match="its remote origin .* has it") as raised:
                ask(history)
            assert "secret" not in str(raised.value)
    assert traps.sprung == set()


def test_a_git_without_the_switch_against_lazy_fetching_fetches_nothing(
    repo: Path, hashes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git before 2.39.4: the environment's GIT_NO_LAZY_FETCH means nothing, so it is taken away here."""
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:none", f"file://{repo}", "partial.git")
    history = CloneHistory(tmp_path / "partial.git")
    del history.git._git._environment["GIT_NO_LAZY_FETCH"]
    before = history.present()
    with pytest.raises(MissingObject, match=f"file://{repo}"):
        history.text("v1", WORKER)
    assert history.present() == before
    assert git(tmp_path / "partial.git", "show", f"v1:{WORKER}")  # git as it is does fetch it
    assert history.present() > before


def test_refs_and_paths_that_look_like_options(repo: Path, hashes: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "written"
    strange = [
        f"--output={out}.py",
        "-x.py",
        "a\x1b[31mred.py",
        "two\nlines.py",
        "tab\t.py",
        ":(top)a.py",
        "é.py",
    ]
    for name in strange:
        write(repo, f"{SPECULATIVE}/{name}", "def f(): pass\n")
    full = commit(repo, "Odd names \x1b[2J (#40)", "2025-04-01")
    (repo / ".git" / "refs" / "heads" / f"--output={out.name}").write_text(full + "\n")
    git(repo, "update-ref", f"refs/heads/{hashes['add'][:10]}", full)  # git takes this name before the hash
    git(repo, "update-ref", "refs/heads/12", full)
    history = CloneHistory(repo)
    assert {path.removeprefix(f"{SPECULATIVE}/") for path in history.files("main")} >= set(strange)
    assert {change.path.removeprefix(f"{SPECULATIVE}/") for change in history.commit("#40").files} == set(
        strange
    )
    assert {life.path.removeprefix(f"{SPECULATIVE}/") for life in history.lives()} >= set(strange)
    assert history.resolve(hashes["add"][:10]) == hashes["add"]
    assert history.resolve("12") == hashes["add"]
    with pytest.raises(NoSuchRef, match="is no ref"):
        history.resolve(f"--output={out.name}")
    with pytest.raises(UpstreamError, match="is no path"):
        history.text("main", f"--output={out}.py")
    assert not list(tmp_path.glob("written*"))


def test_escape_codes_are_written_out(
    repo: Path, hashes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repo, f"{SPECULATIVE}/a\x1b[31mred.py", "x = '\x1b]0;title\x07'\n")
    commit(repo, "Odd \x1b[2J[bold]names (#40)", "2025-04-01")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    source.remember("clone", repo)
    for words in (["show", "#40"], ["diff", "#40"], ["files", "main"], ["log", SPECULATIVE]):
        done = CliRunner().invoke(app, ["upstream", *words], catch_exceptions=False)
        assert done.exit_code == 0 and "\\x1b" in done.output, done.output
        assert "\x1b" not in done.output and "\x07" not in done.output


def test_replaced_and_grafted_history_is_not_believed(
    repo: Path, what: Named, ledger: LedgerHistory, hashes: dict[str, str]
) -> None:
    git(repo, "replace", git(repo, "rev-parse", f"v1:{WORKER}"), git(repo, "rev-parse", f"v1:{TREE}"))
    git(repo, "replace", hashes["add"], hashes["start"])
    write(repo / ".git", "info/grafts", f"{hashes['drop']} {hashes['start']}\n")
    assert "return 11" not in git(repo, "show", f"v1:{WORKER}")  # git as it is believes it
    ask_everything(CloneHistory(repo, ledger), ledger, what)


def test_the_callers_environment_steers_nothing(
    repo: Path,
    what: Named,
    ledger: LedgerHistory,
    traps: Traps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(tmp_path / "other", worker="x = 1\n")
    trace = tmp_path / "trace"
    exec_path = tmp_path / "exec"
    traps.program("exec-path", exec_path / "git-rev-list")
    write(tmp_path, "config/git/attributes", "* -diff\n")
    for name, value in {
        "GIT_DIR": str(tmp_path / "other" / ".git"),
        "GIT_WORK_TREE": str(tmp_path / "other"),
        "GIT_OBJECT_DIRECTORY": str(tmp_path / "other" / ".git" / "objects"),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "GIT_NAMESPACE": "other",
        "GIT_EXEC_PATH": str(exec_path),
        "GIT_EXTERNAL_DIFF": traps.program("GIT_EXTERNAL_DIFF"),
        "GIT_PAGER": traps.program("GIT_PAGER"),
        "GIT_CONFIG_PARAMETERS": "'diff.renames'='false' 'core.quotePath'='true'",
        "GIT_DIFF_OPTS": "--unified=0",
        "GIT_TRACE": str(trace),
        "GIT_ICASE_PATHSPECS": "1",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(name, value)
    ask_everything(CloneHistory(repo, ledger), ledger, what)
    assert traps.sprung == set() and not trace.exists()
    assert os.environ["GIT_NAMESPACE"] == "other"  # and it is left as it was


def test_the_repositorys_own_settings_change_no_answer(
    repo: Path, what: Named, ledger: LedgerHistory
) -> None:
    write(repo, "letters", "\n".join("bacaddddb") + "\n")  # patience finds another difference than myers
    for name in ("x", "y"):
        write(repo, name, name + "\n".join("0123456789") + "\n")
    commit(repo, "Before (#40)", "2025-04-01")
    write(repo, "letters", "\n".join("adaddadcb") + "\n")
    for name in ("x", "y"):
        (repo / name).unlink()
        write(repo, f"{name}-renamed", name + "\n".join("0123456788") + "\n")
    commit(repo, "After (#41)", "2025-04-01")
    for setting in (
        "diff.renames false,diff.algorithm patience,diff.noprefix true,diff.context 0,core.quotePath true,"
        "color.ui always,core.abbrev 4,diff.suppressBlankEmpty true,i18n.logOutputEncoding UTF-16,"
        "log.date relative,diff.renameLimit 1,diff.relative true,diff.colorMoved plain"
    ).split(","):
        git(repo, "config", *setting.split())
    history = CloneHistory(repo, ledger)
    ask_everything(history, ledger, what)
    assert history.commit("#41").files == (
        Change("letters", 3, 3),
        Change("x-renamed", 1, 1),
        Change("y-renamed", 1, 1),
    )
    assert history.diff("#7", WORKER).startswith(f"diff --git a/{WORKER} b/{WORKER}\n")
    assert "\n \n     @property\n     def size" in history.diff("#7", WORKER)  # three lines of context


def test_fetching_from_a_repository_with_traps_runs_none(
    repo: Path,
    what: Named,
    ledger: LedgerHistory,
    traps: Traps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm(repo, traps)
    for where in ("hooks", "template/hooks"):
        traps.program(f"{where[:5]}-reference-transaction", tmp_path / where / "reference-transaction")
    hooks = f"[core]\nhooksPath = {tmp_path}/hooks\n[init]\ntemplateDir = {tmp_path}/template\n"
    write(tmp_path, "gitconfig", hooks)  # the reader's own settings hold for a download, but for their hooks
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    history = fetch_clone(f"file://{repo}", [], what, ledger, lambda text: None, lambda *progress: None)
    ask_everything(history, ledger, what)
    assert traps.sprung == set()
    for url in (
        f"ext::{traps.program('ext')}",
        "git://example.org/x",
        "http://example.org/x",
        "--upload-pack=x",
    ):
        with pytest.raises(UpstreamError, match="is no address"):
            fetch_clone(url, [], what, ledger, lambda text: None, lambda *progress: None)
    assert traps.sprung == set()


def test_a_rewritten_address_runs_no_program(
    repo: Path,
    what: Named,
    ledger: LedgerHistory,
    traps: Traps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path, "gitconfig", f'[url "ext::{traps.program("ext")} "]\ninsteadOf = file://\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UpstreamError, match="transport 'ext' not allowed"):
        fetch_clone(f"file://{repo}", [], what, ledger, lambda text: None, lambda *progress: None)
    assert traps.sprung == set()


def test_a_clone_of_somebody_else_is_read(repo: Path, what: Named, ledger: LedgerHistory) -> None:
    """git refuses it as dubious ownership where it finds the folder by itself."""
    history = CloneHistory(repo, ledger)
    history.git._git.update_environment(GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    ask_everything(history, ledger, what)
