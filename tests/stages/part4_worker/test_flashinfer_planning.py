"""The FlashInfer backend around a stand-in for the library: what is planned, laid out and masked.

The kernels themselves are tested on a GPU, in test_flashinfer_gpu.py.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from stages.part4_worker import Engine
from stages.part4_worker.layers.attention.flashinfer_backend import FlashInferAttnBackend, check_flashinfer
from stages.part4_worker.model_executor.model_runner import ModelRunner
from tests.contract.harness import Zoo, run
from tests.contract.models import BASE, GROUP3, TargetSpec
from tests.contract.reference import simulate
from tests.stages.part4_worker import fake_flashinfer
from tests.stages.part4_worker.attention_pool import STEPS, Pool

NEW = 10
# Sizes 2 alone: three requests run eagerly, then two in a graph, then one in the graph for two.
GRAPHS = {"graphs": {"cuda_graph_bs": [2]}, "eager": {"disable_cuda_graph": True}}
TREES = {"plain": None, "chain": (3, 1, 4), "tree": (3, 2, 8), "wide": (2, 4, 6)}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    made = Zoo(tmp_path_factory.mktemp("zoo"))
    yield made
    made.close()


@pytest.fixture
def fake(monkeypatch):
    return fake_flashinfer.install(monkeypatch)


def make_engine(zoo, monkeypatch, tree, spec=BASE, **flags) -> Engine:
    """A torch_native engine on a CPU whose attention is the FlashInfer backend's."""
    monkeypatch.setattr(ModelRunner, "_make_attn_backend", lambda runner: FlashInferAttnBackend(runner))
    if tree is not None:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        flags |= dict(zip(names, tree, strict=True))
        flags |= {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(zoo.head(spec))}
    return Engine(
        model_path=str(zoo.target(spec)), skip_tokenizer_init=True, device="cpu", dtype="float32",
        attention_backend="torch_native", max_total_tokens=1024, max_running_requests=8, **flags,
    )  # fmt: skip


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", TREES)
def test_tokens_and_rounds_are_the_references(zoo, fake, monkeypatch, name, page, graphs):
    """Prompts read in chunks, requests that end apart, NaN in every slot that nobody owns."""
    prompts, tree = zoo.prompts((3, 17, 30), NEW), TREES[name]
    params = [{"max_new_tokens": n, "ignore_eos": True} for n in (NEW, 4, 7)]
    flags = {"page_size": page, "chunked_prefill_size": 16, **GRAPHS[graphs]}
    with make_engine(zoo, monkeypatch, tree, **flags) as engine:
        done = run(engine, prompts, params, before=lambda probe: probe.poison())
    assert done.tokens == [zoo.r0(q, **p) for q, p in zip(prompts, params, strict=True)]
    if tree is not None:
        pairs = zip(prompts, done.tokens, strict=True)
        assert done.rounds == [simulate(zoo.ref_head(), p, o, *tree) for p, o in pairs]


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_graphs_that_keep_logits(zoo, fake, monkeypatch, name):
    """Log-probabilities need other graphs over the same plans."""
    prompts = zoo.prompts((3, 17), NEW)
    with make_engine(zoo, monkeypatch, TREES[name], **GRAPHS["graphs"]) as engine:
        done = run(engine, prompts, {"max_new_tokens": NEW, "ignore_eos": True}, return_logprob=True)
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW, ignore_eos=True) for p in prompts]


@pytest.mark.parametrize("heads", [6, 8])
def test_query_heads_in_groups(zoo, fake, monkeypatch, heads):
    """Groups of three decode with the wrapper for that; larger ones with the wrapper that takes any."""
    spec = GROUP3 if heads == 6 else TargetSpec(name="group4", heads=8, kv_heads=2, seed=2)
    (prompt,) = zoo.prompts((9,), NEW, spec)
    with make_engine(zoo, monkeypatch, None, spec) as engine:
        tokens = run(engine, [prompt], {"max_new_tokens": NEW, "ignore_eos": True}).tokens
    assert tokens == [zoo.r0(prompt, spec, max_new_tokens=NEW, ignore_eos=True)]
    assert ("decode" in {kind for kind, _ in fake.plans}) == (heads == 6)


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name, rounds", [("plain", 3), ("chain", 2), ("tree", 2)])
def test_what_is_planned_and_how_often(zoo, fake, monkeypatch, name, rounds, graphs):
    """A decode step plans once, a round of speculation three times: all draft levels share a plan."""
    prompts, counts = zoo.prompts((5, 12), NEW), []

    def after(probe):
        # Without a GPU a size is prepared when it is first needed, for requests without entries.
        counts.append([lens for _, lens in fake.plans if any(lens)])
        fake.plans.clear()

    with make_engine(zoo, monkeypatch, TREES[name], **GRAPHS[graphs]) as engine:
        fake.plans.clear()
        run(engine, prompts, {"max_new_tokens": NEW, "ignore_eos": True}, after=after, check=False)
    lens = np.array([5, 12])
    assert counts[0] == [[5, 12]] * (1 if name == "plain" else 2)  # the prefill, by target and draft
    if name == "plain":
        assert counts[1 : 1 + rounds] == [[(lens + i + 1).tolist()] for i in range(rounds)]
        return
    steps, topk, n = TREES[name]
    width = min(steps, n - 1) + 1
    assert counts[1] == [(lens + extra).tolist() for extra in (topk * (steps - 1), n, width)]
    assert all(len(plans) == 3 for plans in counts[2 : 2 + rounds])


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", STEPS)
def test_a_graph_is_planned_anew_for_each_batch(fake, page, name):
    """Two sizes captured one after the other and replayed in turns, with padded rows and stale buffers."""
    mode, q_len, masked, planned, tails = STEPS[name]
    pool = Pool(page)
    pool.backend.planner.processors = 6  # filled by four requests, not by two
    pool.backend.init_cuda_graph_state(4, q_len)
    batches = {bs: pool.batch(mode, bs, q_len, masked) for bs in (4, 2)}
    for bs, batch in batches.items():
        pool.attend(batch, pool.queries(bs * q_len))
    steps = [
        (4, [7, 63, 300, 0], [*tails, 0]),
        (2, [20, 0], [tails[0], 0]),
        (4, [0, 0, 0, 0], [0, 0, 0, 0]),
        (2, [9, 40], tails[1:]),
        (4, [1, 2, 3, 80], [tails[0], *tails]),
    ]
    for bs, prefixes, lengths in steps:
        batch, q = batches[bs], pool.queries(bs * q_len)
        lens = pool.fill(batch, prefixes, lengths, planned)
        pool.backend.init_forward_metadata_replay_cuda_graph(mode, bs, lens)
        assert fake.plans[-1][1] == lens.tolist() + [0] * (bs - len(lens))
        pool.check(batch, q, pool.attend(batch, q), 1e-5)


def test_refusals(fake, monkeypatch):
    check_flashinfer(torch.bfloat16, 64)
    with pytest.raises(ValueError, match="float32.*float16 and bfloat16"):
        check_flashinfer(torch.float32, 64)
    with pytest.raises(ValueError, match="80 dimensions.*64, 128, 256"):
        check_flashinfer(torch.float16, 80)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"flashinfer.*pip install '\.\[gpu\]'"):
        check_flashinfer(torch.float16, 64)
