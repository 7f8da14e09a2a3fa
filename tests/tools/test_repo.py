"""The repository itself: pins, packages, settings that bite, rules of the house that a machine can check."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import check_env

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
PACKAGES = [REPO / "stages", REPO / "tools"]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def constraints() -> dict[str, Requirement]:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def named(extras: list[str]) -> list[Requirement]:
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    return [Requirement(text) for text in texts]


def pinned_version(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", f"{pin} is no exact pin"
    return specifier.version


def test_every_named_package_is_pinned_inside_its_range() -> None:
    pins = constraints()
    for requirement in named([extra for extra in EXTRAS if extra != "cpu"]):
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is outside {requirement}"


def test_all_pins_are_exact_and_none_names_a_host() -> None:
    text = (REPO / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text and "--" not in text
    for pin in constraints().values():
        Version(pinned_version(pin))


def test_every_pin_runs_on_the_oldest_python_that_is_promised() -> None:
    """Debian 12 has 3.11.2: a package that wants a later 3.11 cannot be installed there."""
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    pins = {name: pinned_version(pin) for name, pin in constraints().items()}
    for found in metadata.distributions():
        if pins.get(canonicalize_name(found.name)) == found.version:
            wanted = found.metadata["Requires-Python"] or ""
            assert oldest in SpecifierSet(wanted), f"{found.name} {found.version} wants {wanted}"


def test_triton_is_pinned_for_the_cpu_alone() -> None:
    assert "triton" not in constraints()
    assert [Requirement(text).name for text in EXTRAS["cpu"]] == ["triton"]
    assert pinned_version(Requirement(EXTRAS["cpu"][0])) == "3.6.0"
    assert all(requirement.name != "triton" for requirement in named(["dev", "docs", "gpu"]))


def test_what_comes_along_is_pinned_too() -> None:
    """Everything that the named packages require here, in turn; what torch requires differs by its build."""
    pins, seen = constraints(), set()
    waiting = [requirement.name for requirement in named(["dev"])]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        assert name in pins, f"{name} is installed and not in constraints.txt"
        if name == "torch":
            continue
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    assert {"torch", "numpy", "click", "hf-xet"} <= seen


def test_check_env_checks_the_ranges_of_pyproject() -> None:
    ranges = {requirement.name: requirement.specifier for requirement in named(["dev"])}
    del ranges["ruff"], ranges["pytest-xdist"]  # what works without them
    checked = check_env.SUPPORTED | check_env.FETCH_ONLY | check_env.CLONE_ONLY | check_env.TEST_ONLY
    assert {name: check_env.describe_range(bounds) for name, bounds in checked.items()} == {
        name: ",".join(sorted(map(str, specifier), reverse=True)) for name, specifier in ranges.items()
    }


def test_the_console_script_exists() -> None:
    script = PROJECT["project"]["scripts"]["fledge"]
    assert callable(EntryPoint("fledge", script, "console_scripts").load())


# Settings that bite


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="a plain warning"):
        warnings.warn("a plain warning", stacklevel=1)
    with pytest.raises(DeprecationWarning):
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)


def test_every_ignored_warning_has_a_reason() -> None:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    entries = re.search(r"^filterwarnings = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL).group(1).splitlines()
    ignored = [i for i, line in enumerate(entries) if '"ignore' in line]
    assert all(entries[i - 1].strip().startswith("#") for i in ignored)
    assert '"error"' in "".join(entries)


def test_an_unknown_marker_is_an_error() -> None:
    with pytest.raises(pytest.fail.Exception, match="no_such_marker"):
        pytest.mark.no_such_marker  # noqa: B018


def test_pytest_is_strict() -> None:
    settings = PROJECT["tool"]["pytest"]["ini_options"]
    assert {"--strict-config", "--strict-markers", "--import-mode=importlib"} <= set(settings["addopts"])
    markers = [marker.partition(":")[0] for marker in settings["markers"]]
    assert markers == ["gpu", "multi_gpu", "model", "slow", "browser"]


@pytest.mark.slow
def test_a_missing_model_fails_and_does_not_skip(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(target_path): pass\n")
    shutil.copy(REPO / "tests" / "conftest.py", tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            REPO / "pyproject.toml",
            tmp_path,
        ],
        cwd=REPO,
        env={**os.environ, "FLEDGE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Run: fledge models fetch" in done.stdout
    assert "1 error" in done.stdout and "skipped" not in done.stdout


@pytest.mark.gpu
def test_a_gpu_test_runs_only_with_a_gpu() -> None:
    import torch

    assert torch.cuda.is_available()


@pytest.mark.multi_gpu
def test_a_multi_gpu_test_runs_only_with_two() -> None:
    import torch

    assert torch.cuda.device_count() >= 2


# Files and packages


def test_the_license_is_the_standard_text() -> None:
    assert hashlib.sha256((REPO / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_nothing_else_stands_at_the_top() -> None:
    allowed = set(
        "README.md CONTRIBUTING.md LICENSE Makefile pyproject.toml constraints.txt mkdocs.yml .ci .gitignore "
        "stages tools docs tests".split()
    )
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:  # an export has no git
        assert {line.partition("/")[0] for line in listed.stdout.splitlines()} <= allowed


def test_every_package_folder_is_a_package_and_tests_are_none() -> None:
    for path in python_files("stages", "tools"):
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"
    assert not [path for path in python_files("tests") if path.name == "__init__.py"]


def test_files_are_short_and_say_what_they_are_for() -> None:
    for path in python_files("stages", "tools", "tests"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 600, f"{path} is two things in one file"
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_make_has_the_targets_that_are_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "quick", "test-gpu", "site", "lint"} <= targets
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        text = (REPO / name).read_text(encoding="utf-8")
        assert set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)(?=[`\n ]*(?:`|\n|PYTHON))", text)) <= targets


def test_ci_calls_make_test() -> None:
    script = REPO / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_a_built_wheel_carries_stages_and_heads(tmp_path: Path) -> None:
    copy = tmp_path / "repo"
    for name in ("stages", "tools"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir".split()
    subprocess.run([sys.executable, *command, tmp_path / "out", copy], check=True, capture_output=True)
    [wheel] = (tmp_path / "out").glob("fledge-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".toml", ".md", ".json", ".safetensors")
    for folder in PACKAGES:
        files = [path for path in folder.rglob("*") if path.suffix in kinds]
        assert files and {path.relative_to(REPO).as_posix() for path in files} <= inside
    assert not [name for name in inside if name.startswith("tests/")]
