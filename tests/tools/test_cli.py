"""The `fledge` command: quick help, verbs that all answer, errors that say what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tools import check_env
from tools.check_env import Finding, check_package, check_python, in_range, release, report
from tools.cli import app
from tools.docs.cli import app as docs_app
from tools.exercises.cli import app as exercise_app
from tools.lazy import add_lazy
from tools.models.cli import app as models_app
from tools.stages.cli import app as stages_app
from tools.upstream.cli import app as upstream_app

REPO = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "triton", "numpy", "git")


def names(of: typer.Typer) -> list[str]:
    return [command.name or command.callback.__name__ for command in of.registered_commands]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_needs_nothing_heavy() -> None:
    """Counted and not timed: what makes help slow is importing torch and its like."""
    program = (
        "import sys\n"
        "from tools.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = run("-c", program)
    assert done.stdout.strip().endswith("HEAVY []"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "verb",
    [[name] for name in names(app)]
    + [["models", name] for name in names(models_app)]
    + [["docs", name] for name in names(docs_app)]
    + [["exercise", name] for name in names(exercise_app)]
    + [["stages", name] for name in names(stages_app)]
    + [["upstream", name] for name in names(upstream_app)],
)
def test_every_verb_has_help(verb: list[str]) -> None:
    done = CliRunner().invoke(app, [*verb, "--help"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output and verb[-1] in done.output


def test_the_package_runs_without_being_installed() -> None:
    done = run("-m", "tools", "--help")
    assert done.returncode == 0
    assert "Usage: fledge" in done.stdout


def test_an_unknown_verb_is_refused() -> None:
    done = CliRunner().invoke(app, ["fly"])
    assert done.exit_code == 2
    assert "fly" in done.output


def lazy_app(target: str) -> typer.Typer:
    made = typer.Typer()
    add_lazy(made, "verb", target, "A verb.")
    add_lazy(made, "other", target, "Another.")  # two, so that the name of a verb is an argument
    return made


def test_a_lazy_verb_gets_all_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def verb(name: str, twice: bool = False, end: str = '.'):\n    print(name * (1 + twice), end)\n"
    (tmp_path / "fledge_lazy_verb.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    made = lazy_app("fledge_lazy_verb:verb")
    assert "fledge_lazy_verb" not in sys.modules
    done = CliRunner().invoke(made, ["verb", "--twice", "a", "--end", "!"], catch_exceptions=False)
    assert done.output == "aa !\n"
    assert CliRunner().invoke(made, ["verb", "--thrice", "a"]).exit_code == 2
    assert "--twice" in CliRunner().invoke(made, ["verb", "--help"]).output


def test_a_missing_module_is_an_error_when_its_verb_is_used() -> None:
    made = lazy_app("tools.no_such_module:verb")
    assert CliRunner().invoke(made, ["--help"]).exit_code == 0
    done = CliRunner().invoke(made, ["verb"])
    assert isinstance(done.exception, ModuleNotFoundError)


def test_path_without_a_model_says_what_to_run(tmp_path: Path) -> None:
    done = run("-m", "tools", "models", "path", "smollm2-135m-instruct", FLEDGE_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""  # a script that takes the output as a folder gets none
    assert "Run: fledge models fetch" in done.stderr
    assert "Traceback" not in done.stderr


def test_fetch_from_a_wrong_file_is_one_sentence(tmp_path: Path) -> None:
    done = run("-m", "tools", "models", "fetch", "--from", "none.whl", FLEDGE_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == "There is no file none.whl."


@pytest.mark.model
def test_path_prints_the_folder_and_nothing_else(target_path: Path, head_path: Path) -> None:
    for name, folder in [("smollm2-135m-instruct", target_path), ("smollm2-135m-eagle", head_path)]:
        done = CliRunner().invoke(app, ["models", "path", name])
        assert done.output == f"{folder}\n"


# check-env


def test_check_env_says_what_is_missing_without_any_package() -> None:
    done = run(
        "-S", "-m", "tools.check_env", "--packages"
    )  # -S: no site-packages, so the standard library alone
    assert done.returncode == 1
    for name, supported in check_env.SUPPORTED.items():
        assert f"{name} is not installed" in done.stdout
        assert f"mend: pip install '{name}{check_env.describe_range(supported)}'" in done.stdout
    assert "Traceback" not in done.stderr


def test_check_env_is_content_here_and_silent_about_packages() -> None:
    done = run("-m", "tools", "check-env", "--packages")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_check_env_without_a_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    assert check_env.main([]) == 1
    said = capsys.readouterr()
    assert said.out.count("mend: fledge models fetch") == 3
    assert "3 things to mend before an engine can run." in said.err
    monkeypatch.setattr(check_env.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    assert check_env.main([]) == 1
    assert "0.0 GB free for the cache; fetching needs 0.6" in capsys.readouterr().out


def test_check_env_with_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "file"))
    assert check_env.main([]) == 1
    assert "mend: set FLEDGE_CACHE to a folder that can be written" in capsys.readouterr().out


@pytest.mark.model
def test_check_env_where_all_is_well(target_path: Path, head_path: Path) -> None:
    done = CliRunner().invoke(app, ["check-env"])
    assert done.exit_code == 0, done.output
    assert str(target_path) in done.output and str(head_path) in done.output


def test_check_env_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env.shutil, "which", lambda name: None)
    assert [finding.mend for finding in check_env.check_machine() if finding.state != "good"] == [
        "apt install g++"
    ]


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("2.8.1", False),
        ("2.9.0", True),
        ("2.9.0rc1", True),
        ("2.14.9+cu130", True),
        ("2.15.0", False),
        ("3", False),
    ],
)
def test_supported_ranges(version: str, inside: bool) -> None:
    assert in_range(version, check_env.SUPPORTED["torch"]) is inside


def test_versions_are_compared_as_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2024.11.6") > release("2024.5.15")
    assert release("5.0.0rc1") == (5, 0, 0)
    assert check_python((3, 10, 9)).state == "bad"
    assert check_python((3, 14, 0)).state == "good"


def test_an_old_package_is_named_with_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env, "installed", lambda name: "4.57.1")
    finding = check_package("transformers", ("5.0", "6"))
    assert finding == Finding(
        "bad", "transformers 4.57.1 is outside transformers>=5.0,<6", "pip install 'transformers>=5.0,<6'"
    )
    assert report([finding]).splitlines()[0].split() == ["NO", *finding.what.split()]


def test_what_is_missing_is_a_note_only_where_something_works_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_env, "installed", lambda name: None)
    assert check_package("gguf", ("0.17", "1"), ": no fetch").state == "note"
    assert check_package("torch", ("2.9", "2.15")).state == "bad"
    monkeypatch.setattr(check_env, "installed", lambda name: "3.12.0")
    assert check_package("triton", check_env.TRITON, ": no triton").state == "bad"


@pytest.mark.parametrize(
    ("triton", "numpy", "state"), [("3.6.0", "2.3.5", "good"), ("3.6.0", "2.4.1", "note")]
)
def test_the_interpreter_needs_a_fitting_numpy(
    monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, state: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check_env, "installed", {"triton": triton, "numpy": numpy}.get)
    findings = list(check_env.check_accelerator())
    assert findings[-1].state == state and "TRITON_INTERPRET" in findings[-1].what
