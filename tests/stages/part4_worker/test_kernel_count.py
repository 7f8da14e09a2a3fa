"""Kernels of a layer at one row, counted: launches of ours, and operations of PyTorch that do any work."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from stages.part4_worker import Engine
from tests.contract import models
from tests.contract.harness import Zoo
from tests.contract.probe import Operations, swapped

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def launches(engine, monkeypatch) -> list[str]:
    """What one decode forward of one request launches."""
    runner, seen, inside = engine.scheduler.tp_worker.model_runner, [], []
    real = runner.forward
    for kind in (InterpretedFunction, JITFunction):

        def told(self, *args, _run=kind.run, **kwargs):
            if inside:
                seen.append(self.fn.__name__)
                inside.append(None)
            # The interpreter itself works with tensors; those are no operations of the model.
            with torch.utils._python_dispatch._disable_current_modes():
                return _run(self, *args, **kwargs)

        monkeypatch.setattr(kind, "run", told)

    def forward(forward_batch):
        if not forward_batch.forward_mode.is_decode():
            return real(forward_batch)
        inside.append(None)
        with Operations(seen):
            result = real(forward_batch)
        inside.clear()
        return result

    with swapped(runner, "forward", forward):
        engine.generate(input_ids=[[5, 6]], sampling_params={"temperature": 0, "max_new_tokens": 2})
    monkeypatch.undo()
    return seen


@pytest.mark.slow
def test_at_most_six_kernels_per_layer_at_one_row(tmp_path, monkeypatch):
    zoo, counts = Zoo(tmp_path), []
    for layers in (1, 3):
        spec = dataclasses.replace(models.TOY8, name=f"layers{layers}", layers=layers)
        with Engine(
            model_path=str(zoo.target(spec)), skip_tokenizer_init=True, device=DEVICE, dtype="float32",
            attention_backend="triton", disable_cuda_graph=True, max_total_tokens=64, max_running_requests=1,
        ) as engine:  # fmt: skip
            counts.append(launches(engine, monkeypatch))
    assert len(counts[0]) > 3 and "_attention_kernel" in counts[0]
    extra = len(counts[1]) - len(counts[0])
    assert extra % 2 == 0 and 0 < extra // 2 <= 6, counts
