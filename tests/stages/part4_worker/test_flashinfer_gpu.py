"""The FlashInfer backend with the real library: attention against the native kernel, engines against plain
decoding by the rule for rounding, and nothing read back on the way.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from stages.part4_worker import Engine
from stages.part4_worker.model_executor.device_io import counts
from stages.part4_worker.model_executor.forward_batch_info import ForwardMode
from tests.contract.harness import Zoo
from tests.contract.models import TargetSpec
from tests.contract.probe import Probe
from tests.stages.part4_worker.attention_pool import STEPS, Pool
from tests.stages.part4_worker.test_real_model_gpu import greedy, prompts_of, speculative
from tools.bench.divergence import judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed: the extra `gpu`"
    ),
]

DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
HEAD64 = TargetSpec(name="head64", hidden=64, heads=3, kv_heads=1, head_dim=64, seed=6)
SHAPES = {"plain": None, "chain": (3, 1, 4), "tree": (3, 4, 8)}
GRAPHS = {"graphs": {}, "eager": {"disable_cuda_graph": True}}


def pool_of(page, dtype):
    return Pool(page, "cuda", dtype, "triton", head_dim=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16])
def test_prefill(page, dtype):
    """Requests of different lengths, one of them behind a prefix."""
    pool = pool_of(page, dtype)
    q_lens, prefixes = [130, 1, 64, 300], [0, 33, 200, 0]
    batch = pool.batch(ForwardMode.EXTEND, 4, max(q_lens), False)
    prefix_lens = pool.fill(batch, prefixes, q_lens, 0, q_lens)
    batch.seq_lens_cpu = prefix_lens + q_lens
    batch.extend_seq_lens_cpu = np.array(q_lens)
    q = pool.queries(sum(q_lens))
    out = pool.attend(batch, q).float()
    expected = pool.expected(batch, q)
    assert (out - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", STEPS)
def test_eager(name, page, dtype):
    """Nothing waits for the device while it plans, and NaN in slots of nobody does not come through."""
    mode, q_len, masked, planned, tails = STEPS[name]
    pool = pool_of(page, dtype)
    for prefixes in ([7, 63, 400], [480, 0, 1]):
        batch, q = pool.batch(mode, 3, q_len, masked), pool.queries(3 * q_len)
        batch.seq_lens_cpu = pool.fill(batch, prefixes, tails, planned)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = pool.attend(batch, q)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pool.check(batch, q, out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("processors", [1, None])
@pytest.mark.parametrize("name", STEPS)
def test_in_a_graph(name, page, dtype, processors):
    """Two sizes captured, replayed in turns for other lengths without a wait, with padded rows."""
    mode, q_len, masked, planned, tails = STEPS[name]
    pool = pool_of(page, dtype)
    pool.backend.init_cuda_graph_state(4, q_len)
    if processors is not None:  # a GPU that these batches fill
        pool.backend.planner.processors = processors
    captured = {}
    for bs in (4, 2):
        batch, q, graph = (
            pool.batch(mode, bs, q_len, masked),
            pool.queries(bs * q_len),
            torch.cuda.CUDAGraph(),
        )
        pool.attend(batch, q)  # makes the plan
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = pool.attend(batch, q)
        wrapper = pool.backend.graph_plans[mode, bs].wrapper
        captured[bs] = batch, q, graph, out, wrapper, list(wrapper._plan_info)
    steps = [
        (4, [7, 63, 300, 0], [*tails, 0]),
        (2, [20, 0], [tails[0], 0]),
        (4, [0, 0, 0, 0], [0, 0, 0, 0]),
        (2, [9, 480], tails[1:]),
        (4, [1, 2, 3, 400], [tails[0], *tails]),
    ]
    for bs, prefixes, lengths in steps:
        batch, q, graph, out, wrapper, plan_info = captured[bs]
        q.copy_(pool.queries(len(q)))
        lens = pool.fill(batch, prefixes, lengths, planned)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pool.backend.init_forward_metadata_replay_cuda_graph(mode, bs, lens)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert list(wrapper._plan_info) == plan_info  # what the graph has in it
        pool.check(batch, q, out, TOLERANCE[dtype])


def test_a_plan_does_not_wait_for_a_busy_device():
    pool = pool_of(1, torch.bfloat16)
    mode, q_len, masked, planned, tails = STEPS["verify"]
    pool.backend.init_cuda_graph_state(3, q_len)
    batch = pool.batch(mode, 3, q_len, masked)
    pool.attend(batch, pool.queries(3 * q_len))
    lens = pool.fill(batch, [7, 63, 300], tails, planned)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    pool.backend.init_forward_metadata_replay_cuda_graph(mode, 3, lens)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


# ---- engines ----


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    made = Zoo(tmp_path_factory.mktemp("zoo"))
    yield made
    made.close()


def flags_of(target, head, shape, **more) -> dict:
    flags = {"model_path": str(target), "device": "cuda", "attention_backend": "flashinfer", **more}
    return flags if shape is None else flags | speculative(head, *shape)


def only_rounding(plain, prompts, expected, outputs) -> list[str]:
    verdicts = [judge(plain, *texts) for texts in zip(prompts, expected, outputs, strict=True)]
    assert "no" not in [v.kind for v in verdicts], [str(v) for v in verdicts]
    return [v.kind for v in verdicts]


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_tiny_model(zoo, name, page, graphs):
    """Chunked prompts, requests that join and leave; plain decoding by our own kernels is the judge."""
    prompts = zoo.prompts((3, 17, 40, 9, 25), 24, HEAD64)
    common = {"skip_tokenizer_init": True, "dtype": "float16", "max_total_tokens": 4096, "page_size": page}
    common |= {"chunked_prefill_size": 16, "max_running_requests": 4}
    with Engine(model_path=str(zoo.target(HEAD64)), device="cuda", **common) as plain:
        expected = greedy(plain, prompts, 24)
        flags = flags_of(zoo.target(HEAD64), zoo.head(HEAD64), SHAPES[name], **common)
        with Engine(**flags, **GRAPHS[graphs]) as engine:
            outputs = greedy(engine, prompts, 24)
            Probe(engine).check_idle()
        only_rounding(plain, prompts, expected, outputs)


@pytest.mark.model
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", SHAPES)
def test_real_model(target_path, head_path, name, graphs):
    pools = {"max_running_requests": 32, "max_total_tokens": 32768}
    with Engine(model_path=str(target_path), device="cuda", **pools) as plain:
        prompts = prompts_of(plain)[:32]
        expected = greedy(plain, prompts, 64)
        flags = flags_of(target_path, head_path, SHAPES[name], **pools)
        with Engine(**flags, **GRAPHS[graphs]) as engine:
            outputs = greedy(engine, prompts, 64)
            alone = greedy(engine, prompts[:1], 64)
        kinds = only_rounding(plain, prompts, expected, outputs)
        only_rounding(plain, prompts[:1], expected[:1], alone)
    assert kinds.count("yes") >= 4  # rounding parts some texts; a wrong loop parts all


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", SHAPES)
def test_one_read_per_step(zoo, name, graphs):
    prompts = zoo.prompts((9, 17), 24, HEAD64)
    common = {"skip_tokenizer_init": True, "dtype": "float16", "max_total_tokens": 4096}
    with Engine(
        **flags_of(zoo.target(HEAD64), zoo.head(HEAD64), SHAPES[name], **common), **GRAPHS[graphs]
    ) as engine:
        greedy(engine, prompts, 24)
        seen, start = [], {}
        with Probe(engine).watch(
            before=lambda: start.update(counts),
            after=lambda: seen.append(counts["downloads"] - start["downloads"]),
        ):
            greedy(engine, prompts, 24)
    assert set(seen) <= {0, 1} and seen.count(1) > 3
