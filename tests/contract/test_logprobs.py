"""Scores and hidden states: the rows belong to the tokens, for prompts in chunks and for
accepted runs alike.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import drafters
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe

TREE = (3, 2, 8)
SHAPES = [None, (3, 1, 4), TREE]


def true_logprobs(zoo, sequence):
    """log p of every token of a sequence given those before it, and the whole rows."""
    rows = torch.log_softmax(zoo.ref().run(sequence).logits, -1)
    return [float(rows[i, token]) for i, token in enumerate(sequence[1:])], rows


def check_entries(entries, tokens, want):
    assert [entry[1] for entry in entries] == tokens
    for entry, value in zip(entries, want, strict=True):
        assert entry[0] == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("perfect", [False, True])
def test_output_logprobs(stage, engines, zoo, tree, perfect):
    if perfect and tree is None:
        return
    prompts, ids = zoo.prompts((5, 9, 12), 16), [7, 30, 99]
    engine = engines.get(tree=tree)

    def generate():
        return run(
            engine,
            prompts,
            [{"max_new_tokens": n} for n in (16, 7, 1)],
            return_logprob=True,
            top_logprobs_num=3,
            token_ids_logprob=ids,
        )

    if perfect:
        with drafters.perfect(Probe(engine), zoo.ref()):
            done = generate()
    else:
        done = generate()
    for prompt, result in zip(prompts, done.results, strict=True):
        out, meta = result["output_ids"], result["meta_info"]
        want, rows = true_logprobs(zoo, prompt + out)
        check_entries(meta["output_token_logprobs"], out, want[len(prompt) - 1 :])
        assert len(meta["output_top_logprobs"]) == len(meta["output_token_ids_logprobs"]) == len(out)
        for i, (top, asked) in enumerate(
            zip(meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True)
        ):
            row = rows[len(prompt) - 1 + i]
            best = torch.sort(row, descending=True, stable=True)
            check_entries(top, best.indices[:3].tolist(), best.values[:3].tolist())
            check_entries(asked, ids, row[ids].tolist())


@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_prompt_logprobs_in_a_mixed_batch(stage, engines, zoo, tree, chunk):
    """Eight prompts scored while others decode, some asking for all, some for a tail, some for nothing."""
    lengths = (3, 17, 32, 33, 50, 64, 100, 21)
    prompts = zoo.prompts(lengths, 4)
    starts = [0, 0, 0, 10, 0, 63, 0, 20]
    engine = engines.get(tree=tree, chunked_prefill_size=chunk)
    asks = [True] * 7 + [False]
    done = run(engine, prompts, {"max_new_tokens": 1}, return_logprob=asks, logprob_start_len=starts)
    for prompt, start, asked, result in zip(prompts, starts, asks, done.results, strict=True):
        meta = result["meta_info"]
        if not asked:
            assert "input_token_logprobs" not in meta
            continue
        want, _ = true_logprobs(zoo, prompt)
        first, *rest = meta["input_token_logprobs"]
        assert first[0] is None and first[1] == prompt[start]
        check_entries(rest, prompt[start + 1 :], want[start:])


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_prompt_logprobs_after_a_cached_prefix(stage, engines, zoo, tree):
    """Scores need rows, so a cached prefix is used only as far as nothing before it is asked for."""
    prompt = zoo.prompts((33,), 4)[0]
    engine = engines.get(tree=tree)
    run(engine, [prompt])
    done = run(engine, [prompt], {"max_new_tokens": 1}, return_logprob=True, logprob_start_len=10)
    assert done.results[0]["meta_info"]["cached_tokens"] <= 10
    want, _ = true_logprobs(zoo, prompt)
    check_entries(done.results[0]["meta_info"]["input_token_logprobs"][1:], prompt[11:], want[10:])


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_scores_end_with_the_text(stage, engines, zoo, tree):
    """A stop inside an accepted run cuts ids, scores, hidden states and usage at the same token."""
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=12)
    stop = next(t for i, t in enumerate(truth) if i >= 6 and truth.index(t) == i)
    assert truth.index(stop) % 4, "runs of four end at 4 and at 8, and the stop has to lie inside one"
    engine = engines.get(tree=tree)

    def generate():
        return run(
            engine,
            [prompt],
            {"max_new_tokens": 12, "stop_token_ids": [stop]},
            return_logprob=True,
            return_hidden_states=True,
        )

    if tree is None:
        done = generate()
    else:
        with drafters.perfect(Probe(engine), zoo.ref()):
            done = generate()
    out, meta = done.tokens[0], done.results[0]["meta_info"]
    assert out == truth[: truth.index(stop) + 1]
    assert (
        len(out)
        == meta["completion_tokens"]
        == len(meta["output_token_logprobs"])
        == len(meta["hidden_states"])
    )
    check_entries(meta["output_token_logprobs"], out, true_logprobs(zoo, prompt + out)[0][len(prompt) - 1 :])


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("chunk", [None, 7])
def test_hidden_states_are_rows_of_their_tokens(stage, engines, zoo, tree, chunk):
    """Row i is the target's final hidden state that output token i was sampled from; the drafter changes
    nothing.
    """
    prompts = zoo.prompts((5, 12), 16)
    done = run(
        engines.get(tree=tree, chunked_prefill_size=chunk),
        prompts,
        [{"max_new_tokens": n} for n in (16, 9)],
        return_hidden_states=True,
    )
    for prompt, result in zip(prompts, done.results, strict=True):
        out = result["output_ids"]
        want = zoo.ref().run(prompt + out).hidden[len(prompt) - 1 : -1]
        rows = torch.tensor(result["meta_info"]["hidden_states"])
        assert rows.shape == want.shape
        torch.testing.assert_close(rows, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_scores_are_the_models_own(stage, engines, zoo, tree):
    """Temperature, filters, bias and penalties choose the token; its score stays that of the model."""
    prompts = zoo.prompts((5, 9), 16)
    params = [{"temperature": 0.5, "top_p": 0.8}, {"frequency_penalty": 0.7, "logit_bias": {"50": 5.0}}]
    done = run(engines.get(tree=tree), prompts, params, return_logprob=True)
    for prompt, result in zip(prompts, done.results, strict=True):
        out = result["output_ids"]
        want, _ = true_logprobs(zoo, prompt + out)
        check_entries(result["meta_info"]["output_token_logprobs"], out, want[len(prompt) - 1 :])


@pytest.mark.parametrize("tree", [None, TREE], ids=tree_id)
def test_scores_survive_retraction(stage, engines, zoo, tree):
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24)
    engine = engines.get(tree=tree, max_total_tokens=112)

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    done = run(engine, prompts, {"max_new_tokens": 24}, return_logprob=True, before=optimist)
    assert engine.get_server_info()["num_retractions"] > 0
    for prompt, result in zip(prompts, done.results, strict=True):
        out = result["output_ids"]
        check_entries(
            result["meta_info"]["output_token_logprobs"],
            out,
            true_logprobs(zoo, prompt + out)[0][len(prompt) - 1 :],
        )
