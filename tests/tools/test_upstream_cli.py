"""`fledge upstream …` as a reader meets it: with the shipped ledger alone, and with a clone."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.tools.upstream_repos import KERNEL, TREE, WORKER, build, git, named, recorded
from tools import json_files
from tools.bench.stages_door import STAGES
from tools.exercises.questions import Question
from tools.exercises.rules import recompute
from tools.upstream import ledger as ledger_module
from tools.upstream import source, upkeep
from tools.upstream.history import SPECULATIVE
from tools.upstream.ledger import LedgerHistory
from tools.upstream.named import Named

pytestmark = pytest.mark.slow

EAGLE = "Eagle speculative decoding"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def upstream(fledge: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *words: fledge("upstream", *words)


@pytest.fixture
def hashes(tmp_path: Path) -> dict[str, str]:
    return build(tmp_path / "repo")


@pytest.fixture
def with_clone(tmp_path: Path, hashes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone in use, and a ledger of it where the shipped one would be."""
    path = tmp_path / "ledger.json"
    json_files.write(path, recorded(tmp_path / "repo", named(hashes)).table)
    monkeypatch.setattr(LedgerHistory.load.__func__, "__defaults__", (path,))
    source.remember("clone", tmp_path / "repo")
    return tmp_path / "repo"


# With neither network nor clone


def test_the_chapters_first_listing(upstream: Callable[..., Result]) -> None:
    done = upstream("timeline")
    assert done.stdout.splitlines()[:4] == [
        "2024-12-29  9c05c6898e  Add llama_eagle.py (#2640)",
        f"2024-12-31  b0524c3789  {EAGLE} part 2: Fix cuda graph + DP attention hanging (#2684)",
        f"2025-01-02  ad20b7957e  {EAGLE} part 3: small modifications to the general scheduler (#2709)",
        f"2025-01-02  815dce0554  {EAGLE} part 4: Add EAGLE2 worker (#2150)",
    ]
    days = [line[:10] for line in done.stdout.splitlines()]
    assert len(days) == 12 and days == sorted(days)  # the chapter's own listing is not
    assert "recorded ledger" in done.stderr and "fledge upstream fetch" in done.stderr
    assert upstream("timeline", "flights").exit_code == 1


def test_the_chapters_second_listing(upstream: Callable[..., Result]) -> None:
    done = upstream("files", "v0.4.6", "v0.5.0rc0", "29f6d408c0", "0.5.23")
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:2] == [
        "v0.4.6 5 files, 1 with _worker: eagle_worker",
        "v0.5.0rc0 6 files, 1 with _worker: eagle_worker",
    ]
    assert lines[2].startswith("29f6d408c0 48 files, 10 with _worker: base_spec_worker")
    assert lines[3].startswith("0.5.23 66 files, 11 with _worker:") and lines[3].endswith("uno_worker_v2")
    assert "the chapter's baseline, is not here: main at d55f1c28e2 (2026-08-18)" in done.stderr


def test_a_commit_by_pull_request_hash_or_tag(upstream: Callable[..., Result]) -> None:
    shown = upstream("show", "#2150")
    assert "+1212     -0  in 6 files" in shown.stdout and f"+170     -0  {WORKER}" in shown.stdout
    assert shown.stdout == upstream("show", "2150").stdout == upstream("show", "815dce0554").stdout
    assert "v0.4.6" not in shown.stdout and "(#5795)" in upstream("show", "v0.4.6").stdout


def test_symbols_and_logs_of_the_ledger(upstream: Callable[..., Result]) -> None:
    done = upstream("symbols", "v0.4.6", "eagle_worker.py")
    assert "EAGLEWorker.forward_draft_extend_after_decode" in done.stdout and "17 symbols" in done.stderr
    assert "EAGLEWorkerV2" in upstream("symbols", "0.5.23", "eagle_worker_v2.py").stdout
    log = upstream("log", "eagle_worker.py")
    assert log.stdout.splitlines()[0].endswith("Add EAGLE2 worker (#2150)")
    assert log.stdout.splitlines()[-1].endswith("Deprecate Spec V1 (#25464)")
    partly = upstream("log", "eagle_utils.py")
    assert "Only those that the course names" in partly.stderr and "#2711" in partly.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["diff", "#2711"],
        ["show", "#1"],
        ["files", "v0.5.4"],
        ["symbols", "v0.4.6", "a/b.py"],
        ["log", "setup.py"],
        ["check"],
    ],
)
def test_what_the_ledger_lacks_says_what_to_run(upstream: Callable[..., Result], words: list[str]) -> None:
    done = upstream(*words)
    assert done.exit_code == 1 and done.stdout == ""
    assert "fledge upstream fetch" in done.stderr.splitlines()[-1]


def test_a_broken_ledger_is_one_sentence(
    upstream: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ledger.json").write_text("{")
    monkeypatch.setattr(LedgerHistory.load.__func__, "__defaults__", (tmp_path / "ledger.json",))
    done = upstream("timeline")
    assert done.exit_code == 1 and "take it from there again" in done.stderr


# With a clone


def test_fetch_from_a_folder_and_then_everything_from_it(
    upstream: Callable[..., Result],
    with_clone: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    hashes: dict[str, str],
) -> None:
    shutil.rmtree(cache)
    monkeypatch.setattr(upkeep.Named, "read", lambda: named(hashes))
    done = upstream("fetch", "--from", with_clone)
    assert done.exit_code == 0 and "It has 4 of the 4 commits" in done.stderr, done.stderr
    assert upstream("timeline").stdout.splitlines()[0].endswith("Add the worker (#12)")
    assert "+        return 11" in upstream("diff", "v1", "--path", "eagle_worker.py").stdout
    one = upstream("symbols", "v1", "eagle_worker.py", "Worker.size")
    assert one.stdout == "    @property\n    def size(self):\n        return 11\n"
    assert "defines no none" in upstream("symbols", "v1", "eagle_worker.py", "none").stderr
    assert KERNEL not in upstream("diff", "v1", "--path", SPECULATIVE).stdout
    assert upstream("log", "eagle_worker.py").stdout.count("\n") == 3
    assert f"  {TREE}\n  {WORKER}\n" in upstream("files", "v1").stdout
    checked = upstream("check", "--all")
    assert checked.exit_code == 0 and ", 0 told, 0 failed, 0 not checkable" in checked.stdout.splitlines()[-1]
    assert "proven         ledger: ref v1" in checked.stdout
    git(with_clone, "tag", "--force", "v1", hashes["add"])
    checked = upstream("check")
    assert checked.exit_code == 1 and "failed         ledger: ref v1: recorded" in checked.stdout


def test_a_clone_that_proves_nothing_fails(
    upstream: Callable[..., Result],
    with_clone: Path,
    tmp_path: Path,
    hashes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep.Named, "read", lambda: named(hashes))
    git(tmp_path, "init", "--quiet", "--bare", "empty.git")
    source.remember("clone", tmp_path / "empty.git")
    done = upstream("check")
    assert done.exit_code == 1 and "no clone of sgl-project/sglang" in done.stderr


def test_record_writes_the_ledger_that_check_proves(
    upstream: Callable[..., Result],
    with_clone: Path,
    tmp_path: Path,
    hashes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.tools.test_upstream_fetch import make_wheel

    monkeypatch.setattr(upkeep.Named, "read", lambda: named(hashes))
    monkeypatch.setattr(upkeep, "LEDGER", tmp_path / "ledger.json")
    rule = {"by": "brings", "word": "return {}", "commit": "#7", "path": "speculative/eagle_worker.py"}
    asked = Question("q", "p", "?", "choice", "11", rule, "", "", "", choices=("11", "12"))
    monkeypatch.setattr(upkeep, "read_questions", lambda: [asked])
    assert "fetch --wheel" in upstream("record").stderr
    source.remember("wheel", make_wheel(tmp_path / "sglang-9.9-py3-none-any.whl", a_worker="def f(): pass\n"))
    assert upstream("record").exit_code == 0
    recorded = LedgerHistory.load(tmp_path / "ledger.json")
    assert recorded.wheel.files() == ["sglang/srt/speculative/a_worker.py"]
    assert recompute(asked, recorded) == "11"  # the words that a quiz asks for are recorded with it
    assert upstream("check").exit_code == 0
    assert upstream("files", "9.9").stdout.split() == "9.9 1 files, 1 with _worker: a_worker".split() + [
        "sglang/srt/speculative/a_worker.py"
    ]


# Beside our stages


def test_the_map_names_both_sides(upstream: Callable[..., Result]) -> None:
    done = upstream("map", "part1_draft_model")
    assert "speculative/eagle_forwards.py:EagleForwards.verify " in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [f"{WORKER}:EAGLEWorker.verify", "32", "lines", "84022c0e56"] in lines
    assert upstream("map", "no_such_stage").exit_code == 1
    told = upstream("map", "part4_worker", "nothing").stderr
    assert "maps no 'nothing'; it maps EAGLEWorker" in told and "grow_tree" in told


def test_both_texts_stand_side_by_side_with_a_clone(
    upstream: Callable[..., Result], with_clone: Path, tmp_path: Path, hashes: dict[str, str]
) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "worker.py").write_text("class Mine:\n    def grow(self):\n        return 'ours'\n")
    (stage / "stage.toml").write_text(
        "[features]\npresent = []\n[[symbols]]\nhere = 'worker.py:Mine.grow'\n"
        f"upstream = '{WORKER}:Worker.draft'\ncommit = '{hashes['change']}'\n"
    )
    for name in ("grow", "Mine.grow", "draft", "worker.py:Mine.grow"):
        shown = upstream("map", stage, name).stdout
        assert "return 'ours'" in shown and 'return "draft"' in shown and hashes["change"][:10] in shown


def test_launch_prints_the_real_engines_flags(upstream: Callable[..., Result]) -> None:
    done = upstream(
        "launch",
        "part4_worker",
        "--speculative-num-steps",
        2,
        "--disable-cuda-graph",
        "--cuda-graph-bs",
        "1,2",
    )
    line, _, call = done.stdout.partition("\n\n")
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "sglang.launch_server"] and "--disable-cuda-graph" in words
    assert words[words.index("--speculative-num-steps") + 1] == "2"
    assert "--speculative-eagle-topk" not in words  # the tree's shape gives way as a whole
    assert "$(fledge models path smollm2-135m-instruct)" in words
    assert "speculative_num_steps=2," in call and "disable_cuda_graph=True," in call
    compile(call, "call", "exec")
    assert "knows no flag cuda_graph_bs" in done.stderr and "cuda-graph-bs" not in line


def test_every_flag_of_ours_is_known_upstream_or_said_to_be_not() -> None:
    """The flags that are ours or that 0.5.23 renamed, so that a new one is looked at."""
    from tools.bench.engine_flags import _flag_fields

    unknown = set(_flag_fields()) - set(LedgerHistory.load().wheel.flags)
    assert unknown == {"cuda_graph_bs", "cuda_graph_max_bs"}


def test_every_symbol_of_every_map_is_ours(upstream: Callable[..., Result]) -> None:
    for stage in Named.read().stages:
        assert upstream("map", stage).exit_code == 0, stage
    assert STAGES.is_dir() and ledger_module.LEDGER.is_file()
