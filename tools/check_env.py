"""`fledge check-env`: what works on this machine, and how to mend what does not.

Needs the standard library alone and runs as `python -m tools.check_env` too, so that it can say what is
missing even where that is typer or rich. Every check is a line; only what an engine cannot run without makes
the exit status 1.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

# Package → the first version that is known to work, and the first that is not. tests/tools/test_repo.py holds
# these against pyproject.toml.
SUPPORTED = {
    "torch": ("2.9", "2.15"),
    "transformers": ("5.0", "6"),
    "numpy": ("2.0", "3"),
    "safetensors": ("0.5", None),
    "tokenizers": ("0.22", None),
    "regex": ("2024.5.15", None),
    "typer": ("0.15", None),
    "rich": ("13.7", None),
}
FETCH_ONLY = {"gguf": ("0.17", "1")}
CLONE_ONLY = {"GitPython": ("3.1.50", "4")}
TEST_ONLY = {"pytest": ("8.4", None), "hypothesis": ("6.100", None), "mkdocs-material": ("9.7", None)}
TRITON = ("3.5", "3.10")
MODEL_SPACE = 600_000_000  # bytes that `models fetch` needs for a while: wheel, GGUF and the converted folder
MARKS = {"good": "ok", "note": "--", "bad": "NO"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: `state` is "good", "note" (works without it) or "bad" (does not)."""

    state: str
    what: str
    mend: str = ""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" and "2.13.0rc1" are both (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def in_range(version: str, supported: tuple[str, str | None]) -> bool:
    first, beyond = supported
    return release(version) >= release(first) and (beyond is None or release(version) < release(beyond))


def describe_range(supported: tuple[str, str | None]) -> str:
    first, beyond = supported
    return f">={first}" + (f",<{beyond}" if beyond else "")


def installed(name: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_package(name: str, supported: tuple[str, str | None], without: str = "") -> Finding:
    """One package; `without` says what does not work without it, and makes its absence a note."""
    version, wanted = installed(name), f"{name}{describe_range(supported)}"
    if version is None:
        state, what = ("note" if without else "bad"), f"{name} is not installed{without}"
    elif in_range(version, supported):
        return Finding("good", f"{name} {version}")
    else:
        state, what = "bad", f"{name} {version} is outside {wanted}"
    return Finding(state, what, f"pip install '{wanted}'")


def check_python(version: tuple[int, int, int]) -> Finding:
    text = "Python " + ".".join(map(str, version))
    if version >= (3, 11):
        return Finding("good", text)
    return Finding("bad", f"{text} is older than 3.11", "use a newer Python")


def check_packages() -> Iterator[Finding]:
    yield check_python(tuple(sys.version_info[:3]))
    for name, supported in SUPPORTED.items():
        yield check_package(name, supported)
    yield check_package("triton", TRITON, ": the backend 'triton' cannot be used")
    for name, supported in FETCH_ONLY.items():
        yield check_package(name, supported, ": `fledge models fetch` cannot convert the model")
    for name, supported in CLONE_ONLY.items():
        yield check_package(name, supported, ": `fledge upstream` has the recorded ledger only, no clone")
    for name, supported in TEST_ONLY.items():
        yield check_package(name, supported, ": the tests cannot run")


def check_accelerator() -> Iterator[Finding]:
    """What the engines compute on, and what that means for the backends."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    cuda = torch.version.cuda
    if torch.cuda.is_available():
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
        yield Finding("good", f"CUDA {cuda}, {torch.cuda.device_count()} GPU: {names}")
        flashinfer = installed("flashinfer-python")
        if flashinfer:
            yield Finding("good", f"flashinfer {flashinfer}")
        else:
            yield Finding("note", "flashinfer is not installed: the backend 'flashinfer' cannot be used")
        return
    if cuda is not None:
        yield Finding("note", f"torch is a build for CUDA {cuda}, but no GPU can be used", "see nvidia-smi")
    yield Finding("note", "no GPU: engines run on the CPU, in float32, with the backend 'torch_native'")
    triton, numpy = installed("triton"), installed("numpy")
    if triton and (release(triton)[:2] != (3, 6) or release(numpy or "0") >= (2, 4)):
        yield Finding(
            "note",
            f"Triton's interpreter (TRITON_INTERPRET=1) may fail with triton {triton} and numpy {numpy}",
            "pip install triton==3.6.0 numpy==2.3.5",
        )
    elif triton:
        yield Finding("good", "Triton kernels run in the interpreter (TRITON_INTERPRET=1), slowly")


def check_machine() -> Iterator[Finding]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler:
        yield Finding("good", f"C++ compiler {compiler}")
    else:
        yield Finding(
            "note", "no C++ compiler: Triton and FlashInfer cannot build kernels", "apt install g++"
        )
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("good", f"{threads} CPU cores")


def check_cache() -> Iterator[Finding]:
    """The cache folder: can it be written, is there room, and what lies in it."""
    from .models.cache import FETCHED, ModelError, cache_root, model_path

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        mend = "set FLEDGE_CACHE to a folder that can be written"
        yield Finding("bad", f"the cache {root} cannot be written ({error.strerror})", mend)
        return
    free = shutil.disk_usage(root).free
    missing = 0
    for name in FETCHED:
        try:
            yield Finding("good", f"model {name} in {model_path(name)}")
        except ModelError as error:
            missing += 1
            yield Finding("bad", str(error).partition(" Run: ")[0], "fledge models fetch")
    if missing and free < MODEL_SPACE:
        mend = "make room, or set FLEDGE_CACHE to another disk"
        yield Finding(
            "bad", f"{free / 1e9:.1f} GB free for the cache; fetching needs {MODEL_SPACE / 1e9:.1f}", mend
        )
    else:
        yield Finding("good", f"cache {root} can be written, {free / 1e9:.0f} GB free")


def report(findings: list[Finding]) -> str:
    """The findings as lines; what does not work says how to mend it."""
    lines = []
    for finding in findings:
        lines.append(f"  {MARKS[finding.state]}  {finding.what}")
        if finding.mend and finding.state != "good":
            lines.append(f"      mend: {finding.mend}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the report and return the exit status.

    `--packages` checks the packages alone and prints only what is wrong.
    """
    if "--packages" in arguments:
        findings = [finding for finding in check_packages() if finding.state != "good"]
        if findings:
            print(f"The packages of {sys.executable}:\n{report(findings)}")
    else:
        findings = []
        for check in (check_packages, check_accelerator, check_machine, check_cache):
            for finding in check():  # each line as it comes: importing torch takes seconds
                print(report([finding]), flush=True)
                findings.append(finding)
    bad = sum(finding.state == "bad" for finding in findings)
    if bad:
        print(f"{bad} thing{'s' * (bad > 1)} to mend before an engine can run.", file=sys.stderr)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
