"""Rounds whose drafts are drawn, in graphs: which graphs they are, and that nothing stale in them shows."""

from __future__ import annotations

import itertools

import pytest

from tests.contract.harness import run
from tests.contract.probe import swapped

pytestmark = pytest.mark.slow

REJECT = {"tree": (3, 1, 4), "speculative_use_rejection_sampling": True}
FILTERS = ({"top_p": 0.7}, {"temperature": 0.6, "top_k": 5}, {"min_p": 0.2}, {}, {"top_k": 9})


def asked(count: int, new_tokens: int) -> list[dict]:
    params = [{"temperature": 1.0, **FILTERS[i]} for i in range(count)]
    return [each | {"sampling_seed": i, "max_new_tokens": new_tokens} for i, each in enumerate(params)]


def rounds(results: list[dict]) -> list[tuple]:
    return [(each["output_ids"], each["meta_info"]["spec_verify_ct"]) for each in results]


@pytest.mark.parametrize("counts", [(5, 3, 1), (1, 3, 5)], ids=str)
def test_a_replay_draws_as_an_eager_round_does(engines, zoo, counts):
    """Three batches in graphs of one size, so that the later have rows with an earlier one's parameters."""
    prompts = zoo.prompts((5, 9, 7, 12, 3), 20)
    graphs, eager = engines.get(**REJECT, cuda_graph_bs=[6]), engines.get(**REJECT, disable_cuda_graph=True)
    for count in counts:
        params = asked(5, 20)[::-1][:count]
        inputs = {"input_ids": prompts[:count], "sampling_params": params}
        assert rounds(graphs.generate(**inputs)) == rounds(eager.generate(**inputs))


def test_only_who_samples_is_drawn_for(engines, zoo):
    """A batch draws as long as one of its requests samples, and sorts as long as one of them filters."""
    engine, names = engines.get(**REJECT), []
    real = engine.scheduler.graphs.replay

    def replay(key):
        names.append(key[0])
        return real(key)

    prompts = zoo.prompts((5, 9, 7), 40)
    sampled = {"temperature": 1.0, "sampling_seed": 3}
    params = [
        {**sampled, "top_k": 5, "max_new_tokens": 6},
        {**sampled, "max_new_tokens": 18},
        {"max_new_tokens": 40},
    ]
    with swapped(engine.scheduler.graphs, "replay", replay):
        done = run(engine, prompts, params, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.tokens[2] == zoo.r0(prompts[2], max_new_tokens=40)
    kinds = [name.removesuffix("draft") for name in names if name.endswith("draft")]
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["filtered_", "drawn_", ""]
    assert [f"{kind}draft_extend" for kind in kinds] == [name for name in names if "draft_extend" in name]
