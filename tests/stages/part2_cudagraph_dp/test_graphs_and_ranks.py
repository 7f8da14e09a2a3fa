"""Part 2: the loop's verification as a masked mode and as a graph, state that travels, ranks that agree."""

from __future__ import annotations

import contextlib

import pytest
import torch

from stages.part2_cudagraph_dp import Engine
from stages.part2_cudagraph_dp.layers import dp_attention
from stages.part2_cudagraph_dp.layers.dp_attention import GlobalStep
from stages.part2_cudagraph_dp.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from stages.part2_cudagraph_dp.speculative.eagle_info import EagleDraftInput
from stages.part2_cudagraph_dp.speculative.spec_info import SpeculativeAlgorithm
from tests.contract.harness import Engines, Stage, Zoo
from tests.contract.probe import Probe, swapped
from tests.stages.part4_worker.dp_helpers import (
    LAYERS,
    TWO_RANKS,
    alone,
    check_plain_answers,
    check_plain_graphs_of_one_busy_rank,
    flags,
)

CHAIN = (3, 1, 4)
LENGTHS = (5, 9, 7, 12, 3)
LIMITS = (24, 5, 16, 9, 20)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def engines(zoo):
    made = Engines(Stage("part2_cudagraph_dp"), zoo)
    yield made
    made.close()


def greedy(*limits: int) -> list[dict]:
    return [{"temperature": 0, "max_new_tokens": limit} for limit in limits]


# ---- verification ----


def test_verification_is_a_mode_under_a_mask(engines, zoo):
    """Row i sees rows 0 … i of its request; what CUDA graphs do not hold is the same, mode by mode."""
    engine, seen = engines.get(tree=CHAIN, disable_cuda_graph=True), []
    runner = engine.scheduler.tp_worker.model_runner
    real = runner.forward

    def forward(batch):
        seen.append((batch.forward_mode.name, batch.tree_mask))
        return real(batch)

    with swapped(runner, "forward", forward):
        engine.generate(input_ids=zoo.prompts((5, 9), 12), sampling_params=greedy(12, 12))
    assert {name for name, _ in seen[1:]} == {"TARGET_VERIFY"}
    assert seen[1][1].tolist() == [[[1], [3], [7], [15]]] * 2


def test_a_wrong_mask_is_noticed(engines, zoo):
    """With a row that sees one token less the text is another, so the mask is really read."""
    engine = engines.fresh(tree=CHAIN, disable_cuda_graph=True)
    worker, prompts = engine.scheduler.draft_worker, zoo.prompts((9, 12), 24)
    real = worker.target_worker.model_runner.forward

    def forward(batch):
        if batch.tree_mask is not None:
            batch.tree_mask = batch.tree_mask.clone()
            batch.tree_mask[:, 1:] &= ~1  # nobody but the root sees the root
        return real(batch)

    with engine, swapped(worker.target_worker.model_runner, "forward", forward):
        results = engine.generate(input_ids=prompts, sampling_params=greedy(24, 24))
    assert [r["output_ids"] for r in results] != [zoo.r0(p, max_new_tokens=24) for p in prompts]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("page", [1, 4])
def test_a_graph_gives_what_the_eager_loop_gives(engines, zoo, page, sampled):
    """While requests leave, in sizes that pad, with garbage in everything that a replay must not read."""
    prompts, params = zoo.prompts(LENGTHS, 24), greedy(*LIMITS)
    if sampled:
        params = [p | {"temperature": 0.9, "sampling_seed": i} for i, p in enumerate(params)]
    eager = engines.get(tree=CHAIN, page_size=page, disable_cuda_graph=True)
    wanted = eager.generate(input_ids=prompts, sampling_params=params)
    engine = engines.get(tree=CHAIN, page_size=page, cuda_graph_bs=[2, 4, 8])
    graphs, probe, keys = engine.scheduler.graphs, Probe(engine), []
    decode, replay = engine.scheduler.decode, graphs.replay

    def noted(key):
        keys.append(key)
        return replay(key)

    def spoilt(batch):
        probe.poison()
        for name, recorded in graphs._graphs.items():
            if name[0].startswith("verify"):
                for tensor in tensors_of(recorded.result):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        for chains in engine.scheduler.draft_worker.round_graphs.verify_inputs.values():
            chains.draft_token.fill_(3)
        for buffer in engine.scheduler.draft_worker.round_graphs.inputs.values():
            for array in buffer.host:
                array[...] = 2
        decode(batch)

    with torch.inference_mode(), contextlib.ExitStack() as stack:
        stack.enter_context(swapped(graphs, "replay", noted))
        stack.enter_context(swapped(engine.scheduler, "decode", spoilt))
        results = engine.generate(input_ids=prompts, sampling_params=params)
    for mine, other in zip(results, wanted, strict=True):
        assert mine["output_ids"] == other["output_ids"]
        for name in ("spec_verify_ct", "spec_correct_drafts_histogram"):
            assert mine["meta_info"][name] == other["meta_info"][name]
    assert {8, 4, 2} == {size for name, size in keys if name == ("verify_logits" if sampled else "verify")}
    probe.check_idle()


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for item in vars(value).values():
            yield from tensors_of(item)


def test_what_the_next_round_starts_from_is_no_graphs_memory(engines, zoo):
    """Another graph may be replayed in between, a prefill's or another size's, and graphs share memory."""
    engine, states = engines.get(tree=CHAIN, cuda_graph_bs=[2]), []
    decode = engine.scheduler.decode

    def noted(batch):
        decode(batch)
        states.append(batch.spec_info)

    with swapped(engine.scheduler, "decode", noted):
        engine.generate(input_ids=zoo.prompts((5, 9), 12), sampling_params=greedy(12, 12))
    static = {
        tensor.untyped_storage().data_ptr()
        for recorded in engine.scheduler.graphs._graphs.values()
        for tensor in tensors_of(recorded.result)
    }
    for state in states:
        for name in state._ROWS:
            assert getattr(state, name).untyped_storage().data_ptr() not in static, name


# ---- what travels ----


def test_spec_info_travels_to_the_forward(engines, zoo):
    """ScheduleBatch → ModelWorkerBatch → ForwardBatch, with what the algorithm wants captured."""
    engine, seen = engines.get(tree=CHAIN), []
    loop = engine.scheduler
    real = loop.draft_worker.forward_target_extend

    def forward_target_extend(batch):
        mark = batch.spec_info = EagleDraftInput(torch.zeros(1, 1))
        step = batch.get_model_worker_batch()
        forward_batch = ForwardBatch.init_new(step, loop.tp_worker.model_runner)
        seen.append((step.spec_info is mark, forward_batch.spec_info is mark, step.spec_algorithm))
        seen.append(forward_batch.capture_hidden_mode)
        batch.spec_algorithm = SpeculativeAlgorithm.NONE
        plain = ForwardBatch.init_new(batch.get_model_worker_batch(), loop.tp_worker.model_runner)
        seen.append(plain.capture_hidden_mode)
        batch.spec_algorithm, batch.spec_info = SpeculativeAlgorithm.EAGLE, None
        return real(batch)

    with swapped(loop.draft_worker, "forward_target_extend", forward_target_extend):
        engine.generate(input_ids=zoo.prompts((5, 9), 12), sampling_params=greedy(4, 4))
    assert seen == [(True, True, SpeculativeAlgorithm.EAGLE), CaptureHiddenMode.FULL, CaptureHiddenMode.NULL]


# ---- ranks ----


@pytest.fixture(scope="module")
def two(zoo):
    with Engine(**flags(zoo, **TWO_RANKS, cuda_graph_bs=[1, 2, 4])) as engine:
        yield engine


@pytest.mark.slow
def test_two_ranks_answer_like_one(zoo, two):
    check_plain_answers(zoo, two)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_without_requests_takes_the_graphs_of_the_other(zoo, two, busy):
    """The hang of part 2: an idle rank that ran eagerly beside one that replays would gather other rows."""
    check_plain_graphs_of_one_busy_rank(zoo, two, busy)


@pytest.mark.parametrize(
    "ranks, rows, size",
    [
        (((0, 3), (0, 1)), 3, 4),
        (((0, 0), (0, 1)), 1, 1),
        (((17, 0), (0, 1)), 17, None),
        (((0, 5), (0, 1)), 5, None),
    ],
)
def test_graph_or_eager_is_decided_alike(engines, ranks, rows, size):
    """Both ranks take the same rows and the same size of graph, or both none."""
    from tests.stages.part4_worker.test_dp_attention import Hearsay

    agreed = [
        GlobalStep.agree(Hearsay(*ranks[:i], *ranks[i + 1 :]), extend_tokens=tokens, decode_bs=bs)
        for i, (tokens, bs) in enumerate(ranks)
    ]
    assert agreed[0] == agreed[1] and agreed[0].target_rows == rows
    graphs = engines.get(cuda_graph_bs=[1, 2, 4]).scheduler.graphs
    assert [graphs.padded_size(bs, agreed[0]) for _, bs in ranks] == [size] * 2


def test_an_idle_rank_brings_the_rows_of_a_padded_graph(engines, monkeypatch):
    """Three requests of another rank are padded to four, so every gather takes four rows of each rank."""
    engine = engines.get(cuda_graph_bs=[1, 2, 4])
    step = GlobalStep(target_rows=3, max_decode_bs=3)
    engine.scheduler.graphs.padded_size(3)  # prepared before, so that all that is entered is the step's
    group = alone(dp_attention)
    monkeypatch.setattr(dp_attention, "_group", group)
    with torch.inference_mode():
        engine.scheduler.tp_worker.forward_idle(step)
    rows = [shape[0] for name, shape, _ in group.log if name == "all_gather"]
    assert rows == [4] * LAYERS


def test_eagle_under_dp_attention_is_refused(zoo):
    with pytest.raises(ValueError, match="part2_cudagraph_dp does not have EAGLE under.*part4_worker"):
        Engine(**flags(zoo, CHAIN, chunked_prefill_size=-1, **TWO_RANKS))
