"""`fledge upstream check`: what it proves, what it refuses to believe, and the commands that claims show."""

import copy
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_upstream_fetch import make_wheel
from tests.tools.upstream_repos import KERNEL, RENAMED, SPECULATIVE, TREE, WORKER, build, git, named, recorded
from tools.provenance import REPO
from tools.upstream.check import FAILED, PROVEN, TOLD, UNCHECKED, Fact, check
from tools.upstream.claims import Claim, Disproved, command, prove, read_claims
from tools.upstream.clone import CloneHistory
from tools.upstream.history import UpstreamError
from tools.upstream.ledger import LedgerHistory
from tools.upstream.named import Named
from tools.upstream.source import remember
from tools.upstream.wheel import Wheel


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check") / "repo"


@pytest.fixture(scope="module")
def hashes(repo: Path) -> dict[str, str]:
    return build(repo)


@pytest.fixture(scope="module")
def stage(hashes: dict[str, str]) -> dict[str, Any]:
    """A stage.toml in small, all of it true."""
    return {
        "upstream": {
            "commit": hashes["add"],
            "pull": 12,
            "date": "2025-01-02",
            "until": hashes["change"],
            "until_tag": "v1",
            "until_date": "2025-01-03",
        },
        "follow_ups": [{"commit": hashes["change"], "pull": 7}],
        "symbols": [
            {"here": "w.py:W.size", "upstream": f"{WORKER}:Worker.size", "commit": hashes["add"]},
            {"here": "k.py:verify", "upstream": f"{KERNEL}:verify_tree_greedy", "commit": hashes["change"]},
        ],
        "ahead": [{"what": "…", "commits": [hashes["drop"], hashes["rename"][:10]]}],
    }


@pytest.fixture(scope="module")
def ledger(repo: Path, hashes: dict[str, str], stage: dict[str, Any]) -> LedgerHistory:
    return recorded(repo, named(hashes, **stage))


def states(facts: list[Fact]) -> Counter:
    return Counter(fact.state for fact in facts)


def failed(facts: list[Fact]) -> list[str]:
    return [f"{fact.where}: {fact.what}: {fact.why}" for fact in facts if fact.state == FAILED]


def test_everything_that_was_recorded_is_proven(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, stage: dict[str, Any]
) -> None:
    facts = check(CloneHistory(repo, ledger), None, ledger, named(hashes, **stage))
    assert failed(facts) == [] and states(facts).keys() == {PROVEN}
    of_stage = [fact.what for fact in facts if fact.where == "part1"]
    assert len(of_stage) == 4 + 2 + 2 + 1 + 2  # commits that exist, dates, pull requests, the tag, symbols


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (("refs", "v1"), "start", "ref v1"),
        (("commits", "change", "title"), "Another title", "title: recorded 'Another title'"),
        (("commits", "change", "pull"), 8, "pull: recorded 8, found 7"),
        (("commits", "change", "date"), "2025-01-03T23:30:00+00:00", "date"),
        (
            ("commits", "change", "files"),
            [[WORKER, 2, 1], [KERNEL, 1, 0]],
            f"recorded only [['{WORKER}', 2, 1]]",
        ),
        (("files", "change", SPECULATIVE), [[WORKER, 16]], TREE),
        (("symbols", "change", WORKER), [["Worker", "class", 4, 11]], "symbols of"),
        (("lives", SPECULATIVE), [], "number of files"),
        (("logs", WORKER), [], "log of"),
    ],
)
def test_a_ledger_with_one_wrong_fact_fails(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, where: tuple[str, ...], value: Any, why: str
) -> None:
    table = copy.deepcopy(ledger.table)
    inner = table
    for name in where[:-1]:
        inner = inner[hashes.get(name, name)]
    last = hashes.get(where[-1], where[-1])
    assert last in inner
    inner[last] = hashes.get(value, value) if isinstance(value, str) else value
    altered = LedgerHistory(table)
    complaints = failed(check(CloneHistory(repo, altered), None, altered, named(hashes)))
    assert len(complaints) == 1 and why in complaints[0]


def test_a_life_that_never_was_fails(repo: Path, hashes: dict[str, str], ledger: LedgerHistory) -> None:
    table = copy.deepcopy(ledger.table)
    table["lives"][SPECULATIVE][0][2] = None  # the file that died is said to live
    altered = LedgerHistory(table)
    [complaint] = failed(check(CloneHistory(repo, altered), None, altered, named(hashes)))
    assert f"birth and death of {TREE}" in complaint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"upstream": {"commit": "add", "pull": 13}}, "pull 13"),
        ({"upstream": {"commit": "add", "date": "2025-01-03"}}, "date 2025-01-03"),
        ({"upstream": {"until": "add", "until_tag": "v1"}}, "tag v1"),
        (
            {"symbols": [{"here": "a:b", "upstream": f"{WORKER}:Worker.none", "commit": "add"}]},
            "defines no Worker.none",
        ),
        (
            {"symbols": [{"here": "a:b", "upstream": f"{KERNEL}:verify", "commit": "change"}]},
            "defines no verify",
        ),
        ({"symbols": [{"here": "a:b", "upstream": f"{WORKER}:Worker", "commit": "drop"}]}, "no file"),
        ({"ahead": [{"commits": ["0123456789"]}]}, "has no 0123456789"),
    ],
)
def test_a_stage_file_with_one_wrong_fact_fails(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, change: dict[str, Any], why: str
) -> None:
    def with_hashes(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_hashes(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [with_hashes(inner) for inner in value]
        return hashes.get(value, value)

    complaints = failed(check(CloneHistory(repo, ledger), None, ledger, named(hashes, **with_hashes(change))))
    assert complaints and all(why in complaint for complaint in complaints)


def test_an_altered_repository_fails(hashes: dict[str, str], ledger: LedgerHistory, tmp_path: Path) -> None:
    """The same names over another content: no recorded commit is in it."""
    build(tmp_path / "altered", worker="class Worker:\n    size = 3\n")
    facts = check(CloneHistory(tmp_path / "altered", ledger), None, ledger, named(hashes))
    assert "ref v1" in " ".join(failed(facts)) and not [
        f for f in facts if f.state == PROVEN and "v1" in f.what
    ]


def test_a_moved_tag_and_a_lost_commit_fail(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", str(repo), "moved.git")
    git(tmp_path / "moved.git", "tag", "--force", "v1", hashes["add"])
    table = copy.deepcopy(ledger.table)
    table["commits"]["f" * 40] = table["commits"][hashes["add"]]  # a hash that never was
    doctored = LedgerHistory(table)
    complaints = failed(check(CloneHistory(tmp_path / "moved.git", doctored), None, doctored, named(hashes)))
    assert [complaint.split(":")[1].strip() for complaint in complaints] == ["ref v1", "commit ffffffffff"]


def test_what_a_shallow_or_older_clone_lacks_is_not_checkable(
    repo: Path, hashes: dict[str, str], ledger: LedgerHistory, tmp_path: Path
) -> None:
    git(
        tmp_path,
        "clone",
        "--quiet",
        "--bare",
        "--branch=v1",
        f"file://{repo}",
        "older.git",
        "--single-branch",
    )
    git(tmp_path / "older.git", "update-ref", "refs/heads/main", hashes["change"])
    facts = check(CloneHistory(tmp_path / "older.git", ledger), None, ledger, named(hashes))
    by_what = {fact.what: fact.state for fact in facts}
    assert by_what[f"commit {hashes['drop'][:10]}"] == UNCHECKED
    assert by_what[f"commit {hashes['add'][:10]}"] == PROVEN


CLAIMS = [
    ({"commit": "v1"}, {"commit": "v9"}),
    ({"commit": "#7", "added": 2, "removed": 1, "files": 2}, {"commit": "#7", "added": 3}),
    ({"commit": "#7", "path": WORKER, "added": 1}, {"commit": "#7", "path": KERNEL, "removed": 1}),
    ({"commit": "v1", "path": SPECULATIVE, "files": 2}, {"commit": "v2", "path": SPECULATIVE, "files": 2}),
    ({"commit": "v1", "path": WORKER}, {"commit": "v2", "path": WORKER}),
    ({"commit": "v1", "path": WORKER, "exists": True}, {"commit": "v1", "path": WORKER, "exists": False}),
    ({"commit": "v2", "path": WORKER, "exists": False}, {"commit": "v2", "path": WORKER, "exists": True}),
    (
        {"commit": "v1", "path": WORKER, "has": "return 11"},
        {"commit": "v1^", "path": WORKER, "has": "return 11"},
    ),
    (
        {"commit": "v1^", "path": WORKER, "lacks": "return 11"},
        {"commit": "v1", "path": WORKER, "lacks": "import"},
    ),
    ({"commit": "v1", "path": WORKER, "lines": 16}, {"commit": "v1", "path": WORKER, "lines": 17}),
    (
        {"commit": "v1", "path": WORKER, "symbol": "Worker.size", "lines": 3, "has": "11"},
        {"commit": "v1", "path": WORKER, "symbol": "Worker.draft", "has": "11"},
    ),
    (
        {"commit": "v1", "path": WORKER, "symbol": "helper"},
        {"commit": "v1", "path": WORKER, "symbol": "help"},
    ),
    (
        {"commit": "v1", "path": KERNEL, "symbol": "verify_tree_greedy"},
        {"commit": "v1", "path": KERNEL, "symbol": "v"},
    ),
    ({"commit": "#7", "has": "return 1"}, {"commit": "#7", "has": "import torch"}),
    ({"commit": "#7", "lacks": "import torch"}, {"commit": "#7", "lacks": "verify_tree_greedy"}),
    (
        {"commit": "#7", "added": 2, "path": WORKER, "has": "zz"},
        {"commit": "#7", "added": 1, "path": WORKER, "has": "zz"},
    ),
]


@pytest.mark.parametrize(("true", "false"), CLAIMS[:-1])
def test_a_claim_is_proven_or_disproved(
    repo: Path, ledger: LedgerHistory, hashes: dict[str, str], true: dict[str, Any], false: dict[str, Any]
) -> None:
    history = CloneHistory(repo, ledger)
    claims = [Claim("page", "true", "…", "git", true), Claim("page", "false", "…", "git", false)]
    facts = [f for f in check(history, None, ledger, named(hashes, claims)) if f.where == "claims/page"]
    assert [fact.state for fact in facts] == [PROVEN, FAILED], facts


def test_every_part_of_a_claim_has_to_hold(repo: Path, ledger: LedgerHistory) -> None:
    for proof in CLAIMS[-1]:
        with pytest.raises(Disproved):
            prove(Claim("page", "both", "…", "git", proof), CloneHistory(repo, ledger), None)


@pytest.mark.parametrize("proof", [true for true, _ in CLAIMS[:-1]])
def test_the_command_of_a_claim_shows_it(
    repo: Path, hashes: dict[str, str], proof: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    remember("clone", repo)
    proof = proof | {"commit": {"#7": hashes["change"]}.get(proof["commit"], proof["commit"])}
    shown = command(Claim("page", "id", "…", "git", proof))
    runnable = re.sub("^fledge ", f"{shlex.quote(sys.executable)} -m tools ", shown)
    done = subprocess.run(["bash", "-c", runnable], cwd=repo, capture_output=True, text=True, check=False)
    is_absent = "lacks" in proof or proof.get("exists") is False
    assert (done.stdout.strip() in ("0", "")) is is_absent, (shown, done.stdout, done.stderr)


def test_the_commands_quote_what_a_shell_would_read(repo: Path) -> None:
    proof = {"commit": "v1", "path": WORKER, "has": "$(touch x) 'y' | -z"}
    shown = command(Claim("page", "id", "…", "git", proof))
    assert shown.endswith(""" | grep -n -F -- '$(touch x) '"'"'y'"'"' | -z'""")
    assert command(Claim("page", "id", "…", "told", "from a talk")) == ""
    wheel = {"path": "sglang/a.py", "lines": 3}
    assert (
        command(Claim("page", "id", "…", "wheel", wheel))
        == "unzip -p sglang-0.5.23-*.whl sglang/a.py | wc -l"
    )


def test_wheel_and_told(repo: Path, ledger: LedgerHistory, hashes: dict[str, str], tmp_path: Path) -> None:
    path = "sglang/srt/speculative/a.py"
    claims = [
        Claim("page", "w", "…", "wheel", {"path": path, "symbol": "A.b", "lines": 1, "lacks": "c"}),
        Claim("page", "x", "…", "wheel", {"path": "sglang/none.py", "exists": False}),
        Claim("page", "y", "…", "wheel", {"path": path, "has": "zz"}),
        Claim("page", "t", "…", "told", "from the roadmap"),
    ]
    wheel = Wheel(
        make_wheel(tmp_path / "sglang-0.5.23-py3-none-any.whl", a="class A:\n    def b(self): pass\n")
    )
    for given, expected in ((wheel, [PROVEN, PROVEN, FAILED, TOLD]), (None, [UNCHECKED] * 3 + [TOLD])):
        facts = check(CloneHistory(repo, ledger), given, ledger, named(hashes, claims))
        assert [fact.state for fact in facts if fact.where == "claims/page"] == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('id = "a"\nsays = "A."', "exactly one of"),
        ('id = "a"\nsays = "A."\ntold = "x"\ngit = { commit = "v1" }', "exactly one of"),
        ('id = "A b"\nsays = "A."\ntold = "x"', "kebab-case"),
        ('id = "a"\nsays = "A."\ngit = { commit = "v1", line = 3 }', "line = 3 is not understood"),
        (
            'id = "a"\nsays = "A."\ngit = { commit = "v1", path = "x", lines = "3" }',
            "lines = '3' is not understood",
        ),
        ('id = "a"\nsays = "A."\ngit = { commit = "v1", lines = 3 }', "path of the file"),
        ('id = "a"\nsays = "A."\ngit = { path = "x" }', "commit is missing"),
        ('id = "a"\nsays = "A."\nwheel = { path = "x", commit = "v1" }', "not understood"),
        ('id = "a"\nsays = "A."\ntold = " "', "sentence"),
        ('id = "a"\nsays = "A."\ngit = { commit = "#2150" }', "git knows no #2150"),
        ('id = "a"\nsays = "A."\ntold = "x"\n[[claim]]\nid = "a"\nsays = "B."\ntold = "y"', "used twice"),
        ("id = ", "is no TOML"),
    ],
)
def test_a_malformed_claim_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "page.toml").write_text(f"[[claim]]\n{text}\n", encoding="utf-8")
    with pytest.raises(UpstreamError, match="page.toml") as raised:
        read_claims(tmp_path)
    assert why in str(raised.value)


def test_claims_are_read_with_their_page(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text(
        '[[claim]]\nid = "x-1"\nsays = "A."\ngit = { commit = "v1", files = 1 }\n'
    )
    (tmp_path / "a.toml").write_text('[[claim]]\nid = "y"\nsays = "B."\ntold = "why"\n')
    assert read_claims(tmp_path) == [
        Claim("a", "y", "B.", "told", "why"),
        Claim("b", "x-1", "A.", "git", {"commit": "v1", "files": 1}),
    ]
    assert read_claims(tmp_path / "none") == []


def test_the_shipped_ledger_has_all_that_the_course_names() -> None:
    """Where it fails, something new is named: run `fledge upstream record` with a clone."""
    ledger, what = LedgerHistory.load(), Named.read()
    unknown = [ref for ref in what.commits() if ledger.find(ref) is None]
    assert unknown == []
    groups = {name: group["commits"] for name, group in what.table["groups"].items()}
    assert {name: group["commits"] for name, group in ledger.groups.items()} == groups
    assert ledger.wheel.version == what.table["wheel"]["version"]
    assert RENAMED not in ledger.files("v0.4.6")


def test_the_shipped_ledger_holds_no_code() -> None:
    """Names, hashes and counts, beside the titles; a line of code has a bracket, a colon or the like."""
    table = LedgerHistory.load().table

    def strings(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [text for item in inner for text in strings(item)]

    parts = [table[name] for name in ("files", "symbols", "lives", "logs", "refs", "wheel")]
    assert not [text for text in strings(parts) if any(c in text for c in " =():\n")]
