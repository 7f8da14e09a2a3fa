"""Fixtures of the tool tests: the contract suite's tiny models, as folders and as command-line flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.contract.harness import Zoo
from tests.tools.stage_helpers import MadeUp
from tools.cli import app
from tools.stages import story


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def tiny_flags(zoo: Zoo) -> dict[str, str]:
    """Engine keywords that put a tiny target and its head in place of the embedded ones."""
    return {"model_path": str(zoo.target()), "speculative_draft_model_path": str(zoo.head()), "device": "cpu"}


@pytest.fixture(scope="session")
def tiny_options(tiny_flags: dict[str, str]) -> list[str]:
    """The same as options, without a chat template, which the tiny tokenizer lacks."""
    pairs = [("--" + name.replace("_", "-"), value) for name, value in tiny_flags.items()]
    return [word for pair in pairs for word in pair] + ["--raw"]


@pytest.fixture
def fledge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`fledge WORDS…` in this process, on no terminal; an error that is no exit is raised."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *words: CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Four made-up stages, which `fledge stages …` then speaks of."""
    made = MadeUp(tmp_path)
    monkeypatch.setattr(story, "REPO", tmp_path)
    return made


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch, tiny_flags: dict[str, str]) -> dict[str, str]:
    """Engine keywords for a method that was registered from outside of spec_v2 and has no draft model."""
    from stages.spec_v2 import server_args
    from stages.spec_v2.speculative import spec_registry
    from stages.spec_v2.speculative.spec_info import SpeculativeAlgorithm
    from tests.stages.spec_v2.repeat_worker import RepeatWorker

    for module, name in ((spec_registry, "_registry"), (server_args, "PLUGIN_ALGORITHMS")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(spec_registry, "PLUGIN_ALGORITHMS", server_args.PLUGIN_ALGORITHMS)
    SpeculativeAlgorithm.register("repeat", supports_overlap=True)(lambda _: RepeatWorker)
    flags = {name: value for name, value in tiny_flags.items() if not name.startswith("speculative")}
    return flags | {"speculative_algorithm": "repeat", "speculative_num_draft_tokens": 4}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> type:
    """A clock in place of a GPU's events, a millisecond for each event; returns the class of its graphs."""
    import torch

    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            clock[0] += 1.0
            self.time = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.time - self.time

    class Graph:
        def replay(self) -> None:
            clock[0] += 10.0

    for name, value in {"Event": Event, "CUDAGraph": Graph, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return Graph
