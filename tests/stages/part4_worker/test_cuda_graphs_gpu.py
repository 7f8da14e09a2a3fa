"""What only a GPU shows: after warm-up nothing compiles, allocates or waits; kernels and bytes counted."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys

import pytest
import torch

from stages.part4_worker import Engine
from tests.contract import models
from tests.contract.harness import Zoo
from tests.contract.probe import Probe, swapped

pytestmark = pytest.mark.gpu

TREES = [None, (3, 1, 4), (3, 4, 8)]
IDS = ["plain", "chain", "tree"]
LENGTHS = (5, 9, 7, 12, 3)
ENDS = (4, 9, 14, 19, 24)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def make(zoo):
    """make(tree, spec, **flags): an engine on the GPU that is shut down with the test."""
    with contextlib.ExitStack() as stack:

        def build(tree, spec=models.BASE, **flags) -> Engine:
            given = {
                "model_path": str(zoo.target(spec)), "skip_tokenizer_init": True, "device": "cuda",
                "dtype": "float32", "attention_backend": "triton", "max_total_tokens": 2048,
                "max_running_requests": 8, "cuda_graph_bs": [1, 2, 4, 8],
            }  # fmt: skip
            if tree is not None:
                names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
                given |= {"speculative_algorithm": "EAGLE", **dict(zip(names, tree, strict=True))}
                given |= {"speculative_draft_model_path": str(zoo.head(spec))}
            given = {name: value for name, value in (given | flags).items() if value is not None}
            return stack.enter_context(Engine(**given))

        yield build


def generate(engine, prompts, ends=ENDS, **params):
    each = [{"temperature": 0, "max_new_tokens": n, **params} for n in ends]
    return engine.generate(input_ids=prompts, sampling_params=each[: len(prompts)])


def tokens_and_rounds(results):
    names = ("spec_verify_ct", "spec_correct_drafts_histogram")
    return [(r["output_ids"], *(r["meta_info"].get(name) for name in names)) for r in results]


# ---- the same answers ----


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tree", TREES, ids=IDS)
def test_graph_equals_eager(make, zoo, tree, page):
    """Tokens and accept counts in float32, greedy and sampled, while the batch shrinks through every size."""
    prompts = zoo.prompts(LENGTHS, 24)
    graph = make(tree, page_size=page)
    eager = make(tree, page_size=page, disable_cuda_graph=True, cuda_graph_bs=None)
    for params in ({}, {"temperature": 0.9, "sampling_seed": 5}, {"frequency_penalty": 0.5}):
        done, want = (tokens_and_rounds(generate(engine, prompts, **params)) for engine in (graph, eager))
        assert done == want
        if not params:
            assert [t for t, *_ in done] == [
                zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, ENDS, strict=True)
            ]


# ---- after warm-up ----


def compiled() -> int:
    """Triton kernels compiled so far, every specialisation counted."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if ".kernels.triton" in name]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for f in functions.values() for cache in f.device_caches.values())


@pytest.mark.parametrize("tree", TREES, ids=IDS)
def test_decoding_compiles_nothing_after_the_start(make, zoo, tree):
    """Capturing has run every kernel of every size; prompts have been read once, in batches of both kinds."""
    engine = make(tree)
    prompts = zoo.prompts((5, 9, 7, 12, 3, 6, 8, 4), 24)
    for bs in (1, 8):
        generate(engine, prompts[:bs], [2] * 8)
    seen = []

    def before():
        seen.append(compiled())

    with Probe(engine).watch(before=before):
        for bs in (1, 2, 3, 5, 8, 7):
            assert engine.flush_cache()
            generate(engine, prompts[:bs], (12, 9, 14, 19, 24, 8, 10, 11))
    assert compiled() == seen[0]


@pytest.mark.parametrize("bs", [1, 3, 8])
@pytest.mark.parametrize("tree", TREES, ids=IDS)
def test_a_steady_round_allocates_nothing(make, zoo, tree, bs):
    """Device memory is asked for nothing at all between two rounds with the same rows."""
    engine = make(tree)
    prompts = zoo.prompts((5, 9, 7, 12, 3, 6, 8, 4), 24)[:bs]
    generate(engine, prompts, [24] * 8)
    assert engine.flush_cache()
    asked, is_steady = [], []

    def before():
        reqs = engine.scheduler.running_batch.reqs
        is_steady.append(len(reqs) == bs and not any(req.finished() for req in reqs))
        asked.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    with Probe(engine).watch(before=before):
        generate(engine, prompts, [24] * 8)
    per_step = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    # The round after the prefill copies the new rows' state into place; those after it find it there.
    steady = [n for n, steady in zip(per_step, is_steady, strict=False) if steady]
    assert len(steady) >= 3 and set(steady) == {0}
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0


@contextlib.contextmanager
def no_waiting(engine):
    """Whatever synchronises inside a step of the scheduler is an error; the read by an event is none."""
    real = engine.scheduler.step

    def step():
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with swapped(engine.scheduler, "step", step):
        yield


@pytest.mark.parametrize(
    "flags", [{}, {"disable_cuda_graph": True, "cuda_graph_bs": None}], ids=["graph", "eager"]
)
@pytest.mark.parametrize("tree", TREES, ids=IDS)
def test_no_step_synchronises(make, zoo, tree, flags):
    """Prefill, rounds, and rounds after rows have left; greedy, sampled, penalised and scored."""
    engine, prompts = make(tree, **flags), zoo.prompts(LENGTHS, 24)
    kinds = (
        {},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "sampling_seed": 3},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 3, "logit_bias": {"5": 1.0}},
    )
    for params in kinds:
        generate(engine, prompts, **params)  # whatever is made once may wait
        assert engine.flush_cache()
        with no_waiting(engine):
            results = generate(engine, prompts, **params)
        assert [len(r["output_ids"]) for r in results] == list(ENDS)
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    greedy = {"temperature": 0, "max_new_tokens": 8}
    for waiting in (contextlib.nullcontext(), no_waiting(engine)):
        assert engine.flush_cache()
        with waiting:
            engine.generate(input_ids=prompts, sampling_params=greedy, **more)


# ---- kernels and bytes ----


def kernels_of(engine, key) -> list[str]:
    """Names of the kernels of one replay; copies and fills are none."""
    graphs = engine.scheduler.graphs
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with torch.inference_mode():
            graphs.replay(key)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_most_six_kernels_per_layer_at_one_row(make, dtype):
    counts = []
    for layers in (2, 6):
        spec = dataclasses.replace(models.BASE, name=f"layers{layers}", layers=layers)
        names = kernels_of(make(None, spec, dtype=dtype), ("decode", 1))
        assert any("attention" in name for name in names), names
        counts.append(len(names))
    extra = counts[1] - counts[0]
    assert extra % 4 == 0 and 0 < extra // 4 <= 6, counts


@pytest.mark.parametrize("tree", [None, (3, 4, 8)], ids=["plain", "tree"])
def test_captured_sizes_share_their_memory(make, tree):
    """Seven more sizes below the largest cost little beside what logits of their own would."""
    wide = dataclasses.replace(models.BASE, name="wide", vocab=40_000, tokenizer=False)
    held = []
    for sizes in ([8], list(range(1, 9))):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = make(tree, wide, cuda_graph_bs=sizes)
        gc.collect()
        held.append(torch.cuda.memory_allocated() - before)
        engine.shutdown()
        del engine
    rows = 1 if tree is None else tree[2]
    logits = sum(range(1, 8)) * rows * wide.vocab * 4
    assert held[1] - held[0] < logits / 4


@pytest.mark.parametrize("tree", TREES, ids=IDS)
def test_nothing_is_left_on_the_gpu_by_a_run(make, zoo, tree):
    """Twice the same run: the second holds what the first held, and not one tensor more."""
    engine, prompts, held = make(tree), zoo.prompts(LENGTHS, 24), []
    for _ in range(3):
        assert engine.flush_cache()
        generate(engine, prompts)
        gc.collect()
        held.append(torch.cuda.memory_stats()["allocation.all.current"])
    assert held[1] == held[2]
