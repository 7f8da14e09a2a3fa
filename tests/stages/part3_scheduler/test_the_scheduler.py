"""Part 3: the scheduler is part 4's to the byte, and what it drives drafts a chain."""

from __future__ import annotations

import filecmp
from pathlib import Path

import numpy as np
import pytest

import stages
from tests.contract.harness import Engines, Stage, Zoo, run
from tests.contract.probe import Probe

STAGES = Path(stages.__file__).parent
CHAIN = (3, 1, 4)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def engines(zoo):
    made = Engines(Stage("part3_scheduler"), zoo)
    yield made
    made.close()


@pytest.mark.parametrize(
    "path", ["managers/scheduler.py", "managers/tp_worker.py", "managers/schedule_batch.py",
             "managers/scheduler_output_processor.py", "mem_cache/radix_cache.py", "engine.py"],
)  # fmt: skip
def test_the_worker_came_without_a_change_to_the_scheduler(path):
    """#2150 removed no line of what was there."""
    assert filecmp.cmp(STAGES / "part3_scheduler" / path, STAGES / "part4_worker" / path, shallow=False)


def test_a_step_takes_n_slots_and_gives_back_the_rejected(engines, zoo):
    """A chain is drafted into the slots it is verified in; between steps only what was accepted is held."""
    engine, taken = engines.get(tree=CHAIN, disable_radix_cache=True), []
    real = type(engine.scheduler.running_batch).alloc_decode_slots

    def alloc(batch, width):
        slots = real(batch, width)
        taken.append(slots.shape)
        return slots

    def after(probe):
        held = sum(req.kv_len for req in probe.running())
        assert probe.allocator.available_size() == probe.allocator.size - held

    batch_class = type(engine.scheduler.running_batch)
    batch_class.alloc_decode_slots = alloc
    try:
        prompts = zoo.prompts((5, 9, 7), 16)
        done = run(engine, prompts, {"max_new_tokens": 16}, after=after)
    finally:
        batch_class.alloc_decode_slots = real
    assert done.tokens == [zoo.r0(p, max_new_tokens=16) for p in prompts]
    assert len(taken) > 4 and {width for _, width in taken} == {CHAIN[2]}
    assert engine.scheduler.decode_mem_cache_buf_multiplier == CHAIN[2]


@pytest.mark.parametrize("more", [{}, {"disable_cuda_graph": True}, {"page_size": 4}], ids=str)
def test_a_sampled_text_is_plain_decodings_own(engines, zoo, more):
    """Penalties too: each token is drawn with the number of its position from the same law."""
    prompts = zoo.prompts((5, 9, 7, 12), 16)
    params = [{"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 3 + i} for i in range(4)]
    params[1] |= {"top_p": 0.7, "frequency_penalty": 0.6}
    params[2] |= {"top_k": 5, "repetition_penalty": 1.3}
    params[3] |= {"temperature": 0, "logit_bias": {"17": 3.0}}
    plain, drafted = (run(engines.get(tree=tree, **more), prompts, params) for tree in (None, CHAIN))
    assert drafted.tokens == plain.tokens
    assert max(max(rounds) for rounds in drafted.rounds) > 1


def test_a_chain_that_disagrees_gives_one_token(engines, zoo):
    """And an accepted run ends at the first token that the target would not have said."""
    module = engines.stage.module("speculative.eagle_info")
    torch = pytest.importorskip("torch")
    chain = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 3]])
    said = torch.tensor([[6, 7, 8, 1], [6, 7, 8, 1], [6, 7, 8, 1]])
    zeros = torch.zeros(3, dtype=torch.int64)
    step = module.EagleStep(zeros, torch.tensor([10, 20, 30]), zeros, zeros, zeros)
    paths = module.EagleVerifyInput(step, chain)._paths(said, torch.zeros(3, 4))
    assert paths.lens.tolist() == [4, 1, 3]
    assert paths.tokens.tolist() == [[6, 7, 8, 1], [6, 0, 0, 0], [6, 7, 8, 0]]
    assert paths.nodes.tolist() == [[0, 1, 2, 3], [0, -1, -1, -1], [0, 1, 2, -1]]
    assert paths.kv_lens.tolist() == [14, 21, 33] and paths.last_rows.tolist() == [3, 4, 10]
    assert paths.verified_id.tolist() == [1, 6, 8]
    spoilt = torch.zeros(3, 4)
    spoilt[1, 2] = spoilt[2, 1] = float("nan")
    finite = module.EagleVerifyInput(step, chain)._paths(said, spoilt).is_finite
    assert np.isfinite(finite.numpy()).tolist() == [True, True, False], "behind the path it does not matter"


def test_what_arrives_with_the_worker_is_refused(engines):
    for flags, word in (
        ({"tree": (3, 2, 8)}, "draft trees"),
        ({"tree": CHAIN, "speculative_accept_threshold_single": 0.5}, "verification of trees by sampling"),
        (
            {"tree": CHAIN, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "EAGLE under data-parallel",
        ),
    ):
        with pytest.raises(ValueError, match=f"part3_scheduler does not have.*{word}.*part4_worker"):
            engines.fresh(**flags)


def test_the_draft_is_fed_by_its_own_rows_after_a_merge(engines, zoo):
    """Requests join a batch that decodes: rows of its state follow them, and their rounds stay their own."""
    prompts = zoo.prompts((5, 30, 7), 20)
    engine = engines.get(tree=CHAIN, chunked_prefill_size=8)
    done = run(engine, prompts, {"max_new_tokens": 20}, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.tokens == [zoo.r0(p, max_new_tokens=20) for p in prompts]
    Probe(engine).check_idle()
