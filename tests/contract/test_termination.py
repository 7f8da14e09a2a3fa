"""INV-TERM: the output is R0 cut by the same stop rules, wherever inside an accepted run the end lies."""

from __future__ import annotations

import pytest

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe

SHAPES = [None, (3, 1, 4), (5, 2, 12)]


def texts(stage, engines, zoo, tree, prompts, params, perfect=False, **flags):
    """Engine results with a tokenizer, drafts all right if `perfect`."""
    engine = engines.get(tree=tree, skip_tokenizer_init=False, **flags)
    if not perfect:
        return run(engine, prompts, params).results
    with drafters.perfect(Probe(engine), zoo.ref()):
        return run(engine, prompts, params).results


def decode(zoo, tokens):
    from transformers import AutoTokenizer

    tokenizer = zoo._once("tokenizer", lambda: AutoTokenizer.from_pretrained(str(zoo.target())))
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("tree", [None, (1, 1, 2), (5, 1, 6), (5, 2, 12)], ids=tree_id)
def test_max_new_tokens_is_exact(stage, engines, zoo, tree):
    """The token sampled at prefill is the first output token; every limit is met exactly."""
    limits = list(range(1, 9))
    prompts = [zoo.prompts((9,), 24)[0]] * len(limits)
    done = run(engines.get(tree=tree), prompts, [{"max_new_tokens": n} for n in limits])
    truth = zoo.r0(prompts[0], max_new_tokens=8)
    assert done.tokens == [truth[:n] for n in limits]
    for result, n in zip(done.results, limits, strict=True):
        assert result["meta_info"]["completion_tokens"] == n
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": n}


@pytest.mark.parametrize("kind", ["stop_token_ids", "eos"])
@pytest.mark.parametrize("tree", [(k, 1, k + 1) for k in range(1, 7)] + [(3, 2, 8)], ids=tree_id)
def test_end_token_anywhere_in_an_accepted_run(stage, engines, zoo, tree, kind, tmp_path):
    """One of R0's own tokens is declared to end the text, at every place of an all-accepted run."""
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=12)
    ends = [(i, t) for i, t in enumerate(truth) if truth.index(t) == i]
    if kind == "stop_token_ids":
        engine = engines.get(tree=tree)
        with drafters.perfect(Probe(engine), zoo.ref()):
            done = run(
                engine,
                [prompt] * len(ends),
                [{"max_new_tokens": 12, "stop_token_ids": [t]} for _, t in ends],
                ref=zoo.ref(),
                ref_head=zoo.ref_head(),
            )
        for (i, token), result in zip(ends, done.results, strict=True):
            assert result["output_ids"] == truth[: i + 1]
            assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
            assert result["meta_info"]["completion_tokens"] == i + 1
        return
    place, token = ends[len(ends) // 2]
    folder = models.copy_with_config(zoo.target(), tmp_path / "eos", eos_token_id=[models.EOS, token])
    with engines.fresh(tree=tree, model_path=str(folder)) as engine:
        with drafters.perfect(Probe(engine), zoo.ref()):
            done = run(
                engine, [prompt] * 2, [{"max_new_tokens": 12}, {"max_new_tokens": 12, "ignore_eos": True}]
            )
    assert done.tokens == [truth[: place + 1], truth]
    assert done.results[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert done.results[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_requests_that_end_at_prefill(stage, engines, zoo, tree):
    """100 requests of one token through four rows, then an ordinary one."""
    prompts = zoo.prompts((3, 4, 5, 6, 7), 16)
    engine = engines.get(tree=tree, max_running_requests=4)
    done = run(engine, prompts * 20, {"max_new_tokens": 1})
    assert done.tokens == [zoo.r0(p, max_new_tokens=1) for p in prompts] * 20
    assert run(engine, prompts, {"max_new_tokens": 16}).tokens == [zoo.r0(p) for p in prompts]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_first_token_can_be_the_end(stage, engines, zoo, tree):
    prompt = zoo.prompts((9,), 24)[0]
    first = zoo.r0(prompt, max_new_tokens=1)
    done = run(engines.get(tree=tree), [prompt], {"stop_token_ids": first})
    assert done.tokens == [first]
    assert done.results[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": first[0]}


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_min_new_tokens(stage, engines, zoo, tree):
    """The end token may not come before `min_new_tokens`, and forbidding it changes the text as it does
    plainly.
    """
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=12)
    params = [
        {"stop_token_ids": [truth[1]], "min_new_tokens": n, "max_new_tokens": 12} for n in (0, 1, 2, 5, 12)
    ]
    done = run(engines.get(tree=tree), [prompt] * len(params), params)
    assert done.tokens == [zoo.r0(prompt, **p) for p in params]
    assert len(done.tokens[0]) == 2 and all(
        len(t) >= p["min_new_tokens"] for t, p in zip(done.tokens, params, strict=True)
    )


@pytest.mark.parametrize("tree", [(5, 1, 6), (5, 2, 12)], ids=tree_id)
def test_min_new_tokens_is_reached_inside_an_accepted_run(stage, engines, zoo, tree):
    """The end token comes when it is just allowed, wherever in a run that is: the minimum binds no longer."""
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=12)
    ends = [i for i, token in enumerate(truth) if i and truth.index(token) == i]
    params = [{"stop_token_ids": [truth[i]], "min_new_tokens": i, "max_new_tokens": 12} for i in ends]
    engine = engines.get(tree=tree)
    with drafters.perfect(Probe(engine), zoo.ref()):
        done = run(engine, [prompt] * len(ends), params)
    assert [len(tokens) for tokens in done.tokens] == [i + 1 for i in ends]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("kind", ["stop", "stop_regex"])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_text_anywhere_in_an_accepted_run(stage, engines, zoo, tree, kind, keep):
    """A stop string or regex completed by token i ends ids, text and counts there; streamed text never shows
    it.
    """
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=16)
    full = decode(zoo, truth)
    params, wants = [], []
    for width in (1, 2, 5):
        for at in (0, 1, 3, 6):
            stop = full[at : at + width]
            if len(stop) < width or not stop.isascii():
                continue
            count = next(n for n in range(1, 17) if stop in decode(zoo, truth[:n]))
            pattern = stop if kind == "stop" else "".join(f"[{c}]" if c.isalnum() else "\\" + c for c in stop)
            params.append({"max_new_tokens": 16, kind: [pattern], "no_stop_trim": keep})
            wants.append((count, decode(zoo, truth[:count]) if keep else full[: full.index(stop)]))
    assert len(wants) >= 8
    for result, (count, want) in zip(
        texts(stage, engines, zoo, tree, [prompt] * len(params), params, tree is not None), wants, strict=True
    ):
        assert result["output_ids"] == truth[:count]
        assert result["text"] == want
        assert result["meta_info"]["completion_tokens"] == count
        assert result["meta_info"]["finish_reason"]["type"] == "stop"
    shown: dict[int, list[str]] = {}
    for part in stream(engines, tree, [prompt] * len(params), params):
        shown.setdefault(part["index"], []).append(part["text"])
    for i, (_, want) in enumerate(wants):
        assert shown[i][-1] == want
        assert all(want.startswith(part) for part in shown[i])


def stream(engines, tree, prompt, params):
    engine = engines.get(tree=tree, skip_tokenizer_init=False)
    greedy = (
        [{"temperature": 0, **p} for p in params]
        if isinstance(params, list)
        else {"temperature": 0, **params}
    )
    return list(engine.generate(input_ids=prompt, sampling_params=greedy, stream=True))


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_stop_text_across_two_steps(stage, engines, zoo, tree):
    """A stop string that begins in one round and ends in the next: the first half is held back."""
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=16)
    ascii_at = next(i for i in range(2, 12) if decode(zoo, truth[i : i + 4]).isascii())
    stop = decode(zoo, truth[ascii_at : ascii_at + 4])
    full = decode(zoo, truth)
    count = next(n for n in range(1, 17) if stop in decode(zoo, truth[:n]))
    params = {"max_new_tokens": 16, "stop": stop}
    result = texts(stage, engines, zoo, tree, [prompt], params)[0]
    assert result["output_ids"] == truth[:count] and result["text"] == full[: full.index(stop)]
    parts = [part["text"] for part in stream(engines, tree, prompt, params)]
    assert all(full[: full.index(stop)].startswith(part) for part in parts)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_streamed_text_is_whole_characters(stage, engines, zoo, tree):
    """A character of several bytes is shown when its last byte is there, never in halves."""
    prompt = zoo.prompts((9,), 24)[0]
    euro = [98, 99, 100]
    engine = engines.get(tree=tree, skip_tokenizer_init=False)
    params = {
        "temperature": 0,
        "max_new_tokens": 9,
        "ignore_eos": True,
        "logit_bias": {str(token): 100.0 for token in euro},
    }
    parts = list(engine.generate(input_ids=prompt, sampling_params=params, stream=True))
    shown = [part["text"] for part in parts]
    assert set(parts[-1]["output_ids"]) <= set(euro)
    for earlier in shown[:-1]:
        assert shown[-1].startswith(earlier)
        assert not earlier.endswith("\ufffd") or shown[-1].startswith(earlier)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_stream_is_cumulative_and_equals_generate(stage, engines, zoo, tree):
    prompt = zoo.prompts((9,), 24)[0]
    engine = engines.get(tree=tree, skip_tokenizer_init=False)
    params = {"temperature": 0, "max_new_tokens": 20}
    parts = list(engine.generate(input_ids=prompt, sampling_params=params, stream=True))
    whole = engine.generate(input_ids=prompt, sampling_params=params)
    assert parts[-1]["output_ids"] == whole["output_ids"] == zoo.r0(prompt, max_new_tokens=20)
    assert parts[-1]["text"] == whole["text"] == decode(zoo, whole["output_ids"])
    assert parts[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    for a, b in zip(parts, parts[1:], strict=False):
        assert b["output_ids"][: len(a["output_ids"])] == a["output_ids"] and b["text"].startswith(a["text"])
        assert a["meta_info"]["finish_reason"] is None


@pytest.mark.parametrize("tree", [*SHAPES, (4, 4, 16)], ids=tree_id)
def test_context_limit_ends_a_request(stage, engines, zoo, tree):
    """Generation up to the last position of the context, where the tree sticks out over the end."""
    prompts = zoo.prompts((20, 25, 30), 30)
    done = run(
        engines.get(tree=tree, context_length=32),
        prompts,
        {"max_new_tokens": None},
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=32 - len(p)) for p in prompts]
    assert all(r["meta_info"]["finish_reason"]["type"] == "length" for r in done.results)
