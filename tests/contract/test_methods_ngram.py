"""NGRAM: the invariants of the suite again, for trees that the host looks up in what was said before.

A prompt that holds what the model is about to say makes drafts right; the twin in Python tells which.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import models
from tests.contract.harness import GAP, accepted, run
from tests.contract.probe import Probe
from tests.contract.reference import greedy
from tests.contract.test_sampling_law import big, check_law, draw
from tests.contract.test_triton import GPU

NEW = 24
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
pytestmark = pytest.mark.needs("ngram")


@pytest.fixture(scope="module")
def echoes(zoo):
    """Prompts that hold what the model once said to their first half, and then that half again."""
    found = []
    for prompt in zoo.prompts((5, 9, 7, 12, 3, 14), NEW):
        echo = [*prompt, *zoo.r0(prompt, max_new_tokens=NEW), *prompt]
        if greedy(zoo.ref(), echo, {"max_new_tokens": NEW, "ignore_eos": True}).gap > GAP:
            found.append(echo)
    return found


def truth(zoo, prompts):
    return [zoo.r0(p, max_new_tokens=NEW) for p in prompts]


def simulate(stage, prompt, output, flags) -> list[int]:
    """Tokens of each round of a request that is alone: the twin's trees, walked along the output."""
    twin = stage.module("speculative.cpp_ngram.ngram_twin").NgramTwin(
        100_000,
        flags.get("speculative_ngram_max_trie_depth", 18),
        flags.get("speculative_ngram_min_bfs_breadth", 1),
        flags.get("speculative_ngram_max_bfs_breadth", 10),
        flags.get("speculative_ngram_match_type", "BFS"),
    )
    twin.append([0], [prompt])
    done, rounds, heard = 1, [], [output[:1]]
    while done < len(output):
        trees = twin.match([0], flags["speculative_num_draft_tokens"], heard)
        twin.append([0], heard)
        tokens, _, _, child, sibling = trees[:, 0].tolist()
        row, start = 0, done
        while done < len(output):
            said = output[done]
            done += 1
            row = child[row]
            while row >= 0 and tokens[row] != said:
                row = sibling[row]
            if row < 0:
                break
        rounds.append(done - start)
        heard = [output[start:done]]
    return rounds


SHAPES = [
    {"speculative_num_draft_tokens": 2},
    {"speculative_num_draft_tokens": 12},
    {"speculative_num_draft_tokens": 64, "speculative_ngram_max_trie_depth": 4},
    {"speculative_num_draft_tokens": 8, "speculative_ngram_match_type": "PROB"},
    {"speculative_num_draft_tokens": 8, "speculative_ngram_max_bfs_breadth": 1},
    {"speculative_num_draft_tokens": 5, "speculative_ngram_max_trie_depth": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(str(v) for v in shape.values()))
def test_rounds_are_those_of_the_twin(stage, engines, zoo, echoes, shape):
    """One request at a time, so that the shared trie holds its own words alone."""
    flags = NGRAM | shape
    engine, rounds = engines.get(**flags), []
    for prompt in echoes[:3]:
        assert engine.flush_cache()
        done = run(engine, [prompt], {"max_new_tokens": NEW}, ref=zoo.ref())
        assert done.tokens == truth(zoo, [prompt])
        assert done.rounds[0] == simulate(stage, prompt, done.tokens[0], flags)
        rounds += done.rounds[0]
    assert max(rounds) > 1


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"page_size": 4, "chunked_prefill_size": 7},
        {"disable_cuda_graph": True},
        {"cuda_graph_bs": [4]},
        {"max_running_requests": 2, "disable_radix_cache": True},
        {"speculative_ngram_capacity": 40},
        {"speculative_ngram_capacity": 1},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()) or "plain",
)
def test_flags_that_must_not_matter(stage, engines, zoo, echoes, flags):
    done = run(engines.get(**NGRAM | flags), echoes, {"max_new_tokens": NEW}, ref=zoo.ref())
    assert done.tokens == truth(zoo, echoes)
    if flags.get("speculative_ngram_capacity") == 1:
        assert not any(accepted(result) for result in done.results)
    else:
        assert any(accepted(result) for result in done.results)


def test_the_twin_instead(stage, engines, zoo, echoes, monkeypatch):
    done = run(engines.get(**NGRAM), echoes, {"max_new_tokens": NEW})
    monkeypatch.setenv("FLEDGE_NGRAM", "python")
    with engines.fresh(**NGRAM) as engine:
        again = run(engine, echoes, {"max_new_tokens": NEW})
    assert (again.tokens, again.rounds) == (done.tokens, done.rounds)


def test_some_match_and_some_do_not(stage, engines, zoo, echoes):
    """Two rows with matches, one that says nothing twice, one prompt of a single token."""
    flags = NGRAM | {"disable_radix_cache": True}
    prompts = [echoes[0], [5], [9, 8, 7], echoes[1]]
    for _ in range(2):
        done = run(engines.get(**flags), prompts, {"max_new_tokens": NEW}, ref=zoo.ref())
        assert done.tokens == truth(zoo, prompts)
    lonely = run(engines.get(**flags), [[5]], {"max_new_tokens": 6})
    said = lonely.tokens[0]
    assert len(set([5, *said])) == 7 and lonely.rounds == [[1] * 5], "nothing was said before"


def test_what_others_have_said_is_drafted(stage, engines, zoo):
    """The same prompt again, with no KV kept: nearly all of the answer comes out of the shared trie."""
    prompt = zoo.prompts((9,), NEW)[0]
    engine = engines.get(**NGRAM, disable_radix_cache=True)
    first, again = (run(engine, [prompt], {"max_new_tokens": NEW}) for _ in range(2))
    assert first.tokens == again.tokens == truth(zoo, [prompt])
    assert len(again.rounds[0]) < len(first.rounds[0]) and len(again.rounds[0]) <= -(-(NEW - 1) // 5)
    assert engine.flush_cache()
    assert run(engine, [prompt], {"max_new_tokens": NEW}).rounds == first.rounds, "a flush forgets it"


def test_a_small_pool_retracts(stage, engines, zoo, echoes):
    """Who comes back takes its rows' history along."""
    engine = engines.get(**NGRAM, max_total_tokens=176)

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    done = run(engine, echoes, {"max_new_tokens": NEW}, ref=zoo.ref(), before=optimist)
    assert done.tokens == truth(zoo, echoes)
    assert engine.get_server_info()["num_retractions"] > 0


def test_poison_changes_nothing(stage, engines, zoo, echoes):
    done = run(engines.get(**NGRAM), echoes, {"max_new_tokens": NEW}, before=lambda probe: probe.poison())
    assert done.tokens == truth(zoo, echoes)


def test_what_requests_ask_for(stage, engines, zoo, echoes):
    """Scores, penalties, hidden states and stops in one batch, with drafts among them, as without."""
    params = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "max_new_tokens": 20},
        {"max_new_tokens": 9},
        {"logit_bias": {"7": 30.0}, "max_new_tokens": 17},
        {"stop_token_ids": [zoo.r0(echoes[3], max_new_tokens=NEW)[5]], "max_new_tokens": NEW},
    ]
    more = {"return_logprob": [False, True, False, True], "return_hidden_states": True}
    wanted, done = (run(engines.get(**f), echoes[:4], params, **more) for f in ({}, NGRAM))
    assert done.tokens == wanted.tokens
    for have, want in zip(done.results, wanted.results, strict=True):
        for name in ("finish_reason", "completion_tokens"):
            assert have["meta_info"][name] == want["meta_info"][name]
        scores, states = (
            [torch.tensor(read(r["meta_info"])) for r in (have, want)]
            for read in (_scores, lambda meta: meta["hidden_states"])
        )
        torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    loved = done.results[2]["meta_info"]
    assert loved["spec_verify_ct"] < 10, "a token that is said again and again is drafted"


def _scores(meta):
    return [score for score, _, _ in meta.get("output_token_logprobs", [])]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_joint_law_at_temperature_one(stage, engines, zoo, match_type):
    """Whatever the shared trie holds by then: what was drafted is no likelier for it."""
    spec, prompt = models.TOY8, [3, 1, 4, 1, 5]
    engine = big(engines, spec, None, **NGRAM, speculative_ngram_match_type=match_type)
    outputs = draw(engine, prompt, {}, 1600)
    check_law(zoo.ref(spec), prompt, outputs)
    assert engine.get_server_info()["avg_correct_drafts"] > 0.2


@pytest.mark.gpu
@pytest.mark.needs("triton")
def test_on_a_gpu(stage, engines, zoo, echoes):
    for prompt in echoes[:3]:
        engine = engines.get(**NGRAM, **GPU)
        done = run(engine, [prompt], {"max_new_tokens": NEW})
        assert done.tokens == truth(zoo, [prompt])
        assert done.rounds[0] == simulate(stage, prompt, done.tokens[0], NGRAM)
    done = run(engines.get(**NGRAM, **GPU), echoes, {"max_new_tokens": NEW})
    assert done.tokens == truth(zoo, echoes)


def test_keys_of_the_prefix_cache_are_tokens(stage, engines, zoo, echoes):
    """Without a draft's KV nothing depends on the next token, so a whole prompt but its last token hits."""
    engine = engines.get(**NGRAM)
    run(engine, [echoes[0]], {"max_new_tokens": NEW}, ref=zoo.ref())
    assert Probe(engine).tree.lookahead == 0
    again = run(engine, [echoes[0]], {"max_new_tokens": NEW}, ref=zoo.ref())
    assert again.results[0]["meta_info"]["cached_tokens"] == len(echoes[0]) - 1
    assert again.tokens == truth(zoo, [echoes[0]])
    Probe(engine).check_tree_kv(zoo.ref())
