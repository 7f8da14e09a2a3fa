"""Rejection sampling: drafts are drawn, and what is emitted follows the target's law, with more accepted."""

from __future__ import annotations

import re

import pytest
import torch

from tests.contract import models
from tests.contract.harness import run
from tests.contract.probe import Probe
from tests.contract.test_refusals import EAGLE, refused
from tests.contract.test_sampling_law import big, check_law, draw
from tests.contract.test_triton import GPU

PROMPT = [3, 1, 4, 1, 5]
REJECT = {"speculative_use_rejection_sampling": True}
TREE = (2, 1, 3)
pytestmark = pytest.mark.needs("rejection_sampling")


@pytest.mark.parametrize("spec", [models.TOY8, models.TOY8_EAGLE3], ids=lambda spec: spec.name)
@pytest.mark.parametrize("flags", [{}, {"page_size": 4, "disable_cuda_graph": True}], ids=["", "eager pages"])
def test_joint_law_at_temperature_one(stage, engines, zoo, spec, flags):
    """Of EAGLE-3's eight tokens two are never drafted."""
    engine = big(engines, spec, TREE, **REJECT, **flags)
    check_law(zoo.ref(spec), PROMPT, draw(engine, PROMPT, {}, 1600))
    drawn = engine.get_server_info()["avg_correct_drafts"]
    engine = big(engines, spec, TREE, **flags)
    draw(engine, PROMPT, {}, 400)
    assert drawn > 1.5 * engine.get_server_info()["avg_correct_drafts"]


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0.4}, {"top_k": 4}, {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.1}],
    ids=lambda f: ",".join(f"{k}={v}" for k, v in f.items()),
)
def test_filters(stage, engines, zoo, filters):
    spec, prompt = models.TOY16, [3, 1, 4, 1, 5, 9, 2, 6]
    outputs = draw(big(engines, spec, TREE, **REJECT), prompt, filters)
    check_law(zoo.ref(spec), prompt, outputs, **filters)


def test_a_head_that_knows_nothing_does_not_bend_the_law(stage, engines, zoo):
    engine = big(engines, models.TOY8, TREE, skill=0.0, **REJECT)
    check_law(zoo.ref(models.TOY8), PROMPT, draw(engine, PROMPT, {}, 1600))


@pytest.mark.gpu
@pytest.mark.needs("triton")
def test_on_a_gpu(stage, engines, zoo):
    """Drawn and verified in graphs that were recorded, by requests that filter and one that is greedy."""
    spec, prompt = models.TOY8, PROMPT
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, TREE, **REJECT, **GPU), prompt, {}, 1600))
    filters = {"temperature": 1.5, "top_k": 6, "top_p": 0.8}
    engine = big(engines, spec, TREE, **REJECT, **GPU)
    check_law(zoo.ref(spec), prompt, draw(engine, prompt, filters, 1600), **filters)
    params = [{"temperature": float(i % 2), "max_new_tokens": 12} for i in range(4)]
    done = run(engine, [prompt] * 4, params)
    assert done.tokens[0] == done.tokens[2] == zoo.r0(prompt, spec, max_new_tokens=12)


def test_a_draft_that_gives_no_numbers(stage, engines, zoo):
    """NaN in all its logits: token 0 is drafted, surely, and the law holds."""
    spec = models.TOY8
    with engines.fresh(spec, tree=TREE, max_running_requests=256, max_total_tokens=16384, **REJECT) as engine:
        head = Probe(engine).draft_runner.model

        def spoil(module, args, output):
            for name in ("next_token_logits", "topk_p", "hidden_states"):
                if (tensor := getattr(output, name)) is not None:
                    setattr(output, name, torch.full_like(tensor, float("nan")))
            return output

        head.register_forward_hook(spoil)
        check_law(zoo.ref(spec), PROMPT, draw(engine, PROMPT, {}))


def test_greedy_requests_among_others(stage, engines, zoo):
    """In one batch with requests that sample: R0's tokens, whichever comes first and whichever ends first."""
    prompts = zoo.prompts((5, 9, 7, 12, 3), 24)
    params = [{"temperature": float(i % 2), "max_new_tokens": (24, 9, 17, 12, 24)[i]} for i in range(5)]
    for flags in ({}, {"page_size": 4, "chunked_prefill_size": 8}):
        engine = engines.get(tree=(3, 1, 4), **REJECT, **flags)
        done = run(engine, prompts, params, ref=zoo.ref(), ref_head=zoo.ref_head())
        for i in (0, 2, 4):
            assert done.tokens[i] == zoo.r0(prompts[i], max_new_tokens=params[i]["max_new_tokens"])


def test_the_same_seed_gives_the_same_text(stage, engines, zoo):
    """Alone or among others, whole or in chunks, pushed back or not: numbers are counted."""
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24)
    params = [{"temperature": 0.8, "sampling_seed": i, "max_new_tokens": 24} for i in range(5)]
    first = run(
        engines.get(tree=(3, 1, 4), **REJECT), prompts, params, ref=zoo.ref(), ref_head=zoo.ref_head()
    )
    alone = [
        run(engines.get(tree=(3, 1, 4), **REJECT), [prompt], [each])
        for prompt, each in zip(prompts, params, strict=True)
    ]
    assert [one.tokens[0] for one in alone] == first.tokens
    assert [one.rounds[0] for one in alone] == first.rounds

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    flags = {"max_total_tokens": 112, "chunked_prefill_size": 5, "disable_cuda_graph": True}
    engine = engines.get(tree=(3, 1, 4), **REJECT, **flags)
    again = run(engine, prompts, params, before=optimist)
    assert again.tokens == first.tokens and engine.get_server_info()["num_retractions"] > 0
    counts = [[r["meta_info"]["spec_verify_ct"] for r in done.results] for done in (first, again)]
    assert counts[0] == counts[1]


def test_penalties_hold(stage, engines, zoo):
    """The target's law is the penalised one; the draft's need not be."""
    outputs = draw(big(engines, models.TOY8, TREE, **REJECT), PROMPT, {"logit_bias": {"3": -100.0}})
    assert not any(3 in output for output in outputs)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"speculative_algorithm": "STANDALONE"}, "not for STANDALONE"),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None}, "not for NGRAM"),
        ({"speculative_eagle_topk": 2, "speculative_num_steps": 2}, "speculative_eagle_topk=2.*set it to 1"),
        ({"speculative_accept_threshold_single": 0.5}, "speculative_accept_threshold_single=0.5"),
        ({"speculative_accept_threshold_acc": 0.5}, "speculative_accept_threshold_acc=0.5"),
    ],
    ids=lambda value: "",
)
def test_what_it_does_not_go_with(stage, flags, words):
    assert re.search(words, refused(stage, EAGLE | REJECT | flags))


def test_a_chain_is_its_default(stage):
    args = stage.module("server_args").ServerArgs.from_kwargs(model_path="m", device="cpu", **EAGLE, **REJECT)
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (5, 1)
    assert args.speculative_num_draft_tokens == 6
