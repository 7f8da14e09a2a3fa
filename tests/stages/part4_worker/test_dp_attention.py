"""DP attention on two gloo ranks: answers, rounds and collectives, whatever each rank happens to run."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading

import numpy as np
import pytest
import torch

from stages.part4_worker import Engine
from stages.part4_worker.configs.model_config import ModelConfig
from stages.part4_worker.kernels import load_kernels
from stages.part4_worker.layers import dp_attention
from stages.part4_worker.layers.dp_attention import DPGroup, GlobalStep
from stages.part4_worker.layers.layernorm import RMSNorm
from stages.part4_worker.managers import data_parallel_controller
from stages.part4_worker.model_executor.cuda_graph_runner import CudaGraphRunner
from stages.part4_worker.models.llama import LlamaMLP
from stages.part4_worker.models.loader import _copy as fill
from stages.part4_worker.models.loader import load_model
from stages.part4_worker.server_args import ServerArgs
from tests.contract import models
from tests.contract.harness import Stage, Zoo
from tests.contract.reference import greedy

from .dp_helpers import (
    GREEDY,
    LAYERS,
    PROMPTS,
    RUNS,
    TREES,
    TWO_RANKS,
    Kept,
    alone,
    begin,
    check_idle,
    check_same,
    entered,
    flags,
    gathers,
    run_id,
    steps,
    told,
)

pytestmark = pytest.mark.slow

TREE = TREES[-1]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def one(zoo):
    """one(tree): an engine in this process, to compare with."""
    kept = Kept(zoo)
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def two(zoo):
    """two(tree): an engine of two ranks."""
    kept = Kept(zoo, **TWO_RANKS)
    yield kept
    kept.close()


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_answers_and_rounds_are_those_of_one_rank(zoo, one, two, run):
    """Greedy and sampled, with penalties, scores and hidden states; accepts differ between the ranks."""
    prompts, tree = zoo.prompts(PROMPTS, 24), run[0]
    results = check_same(two(*run), one(*run), prompts, GREEDY)
    assert [r["output_ids"] for r in results] == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    sampled = [{"temperature": 0.9, "sampling_seed": 5 + i, "max_new_tokens": 12} for i in range(5)]
    sampled[1] |= {"top_p": 0.8, "frequency_penalty": 0.4}
    sampled[2] |= {"temperature": 0, "logit_bias": {"17": 3.0}}
    check_same(two(*run), one(*run), prompts, sampled)
    if tree is not None:
        rounds = [r["meta_info"]["spec_correct_drafts_histogram"] for r in results]
        assert rounds[0] != rounds[1], "both ranks accepted alike, so nothing uneven was tested"


def test_eagle3_is_that_of_one_rank(zoo, one, two):
    """The draft's rows are as wide as the target's three layers in a draft extend, and narrow in the loop."""
    spec = models.EAGLE3
    prompts = zoo.prompts(PROMPTS[:3], 16, spec)
    engines = (made(TREE, eager=True, spec=spec) for made in (two, one))
    results = check_same(*engines, prompts, GREEDY | {"max_new_tokens": 16})
    assert [r["output_ids"] for r in results] == [zoo.r0(p, spec, max_new_tokens=16) for p in prompts]


def test_scores_and_hidden_states_come_back(zoo, one, two):
    prompts = zoo.prompts(PROMPTS[:3], 24)
    ask = dict(
        input_ids=prompts, sampling_params=GREEDY, return_logprob=True, logprob_start_len=[0, 3, -1],
        top_logprobs_num=2, token_ids_logprob=[4, 9], return_hidden_states=True,
    )  # fmt: skip
    for mine, wanted in zip(two(TREE).generate(**ask), one(TREE).generate(**ask), strict=True):
        mine, wanted = mine["meta_info"], wanted["meta_info"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            assert [entry[1] for entry in mine[key]] == [entry[1] for entry in wanted[key]]
            scores = [[entry[0] or 0.0 for entry in meta[key]] for meta in (mine, wanted)]
            np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)
        for key in ("input_top_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert len(mine[key]) == len(wanted[key])
        np.testing.assert_allclose(mine["hidden_states"], wanted["hidden_states"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_a_rank_without_requests_takes_part_in_everything(zoo, two, run):
    """Requests on rank 0 alone, on rank 1 alone, on both, on none."""
    prompts, engine = zoo.prompts(PROMPTS[:2], 24), two(*run)
    wanted = [zoo.r0(prompt, max_new_tokens=24) for prompt in prompts]
    for busy, idle in ((0, 1), (1, 0)):
        assert engine.flush_cache()
        for prompt, tokens in zip(prompts, wanted, strict=True):
            result = engine.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=busy)
            assert result["output_ids"] == tokens
        states = engine.get_server_info()["internal_states"]
        assert states[busy]["num_finished"] == 2
        assert states[idle]["num_finished"] == states[idle]["forward_ct_decode"] == 0
        assert states[busy]["forward_ct"] == states[idle]["forward_ct"]
    results = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [r["output_ids"] for r in results] == wanted
    count = entered(engine)
    assert engine.scheduler.step() is False
    assert steps(engine, count) == [[]], "without work the ranks agree on that and enter nothing else"
    check_idle(engine)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_what_a_rank_has_cached_survives_its_idling(zoo, two, run):
    """While rank 1 works, rank 0 replays graphs over padding rows, and not over what it ran last."""
    (prompt, other), engine = zoo.prompts(PROMPTS[1:3], 24), two(*run)
    first = engine.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=0)["output_ids"]
    engine.generate(input_ids=other, sampling_params=GREEDY, routed_dp_rank=1)
    params = {"temperature": 0, "max_new_tokens": 8}
    longer = engine.generate(
        input_ids=prompt + first, sampling_params=params, routed_dp_rank=0, return_logprob=True
    )
    wanted = greedy(zoo.ref(), prompt + first, params)
    assert longer["meta_info"]["cached_tokens"] >= len(prompt) + len(first) - 2
    assert longer["output_ids"] == wanted.tokens
    scores = [score for score, _, _ in longer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(scores, wanted.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_a_rank_at_its_context_limit(zoo, one, two, run):
    """Rank 0's request ends where the context does, in the middle of a tree, while rank 1 goes on."""
    limit = models.BASE.max_positions
    near, far = zoo.prompts((limit - 5,), 5)[0], zoo.prompts((9,), 24)[0]
    params = [{"temperature": 0, "max_new_tokens": 100}, GREEDY]
    results = check_same(two(*run), one(*run), [near, far], params)
    assert [len(r["output_ids"]) for r in results] == [5, 24]
    assert results[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_prefill_beside_decode(zoo, two, run):
    """Rank 1 reads a prompt in three chunks while two requests decode on rank 0, which waits for nothing."""
    (long,), short, engine = zoo.prompts((33,), 24), zoo.prompts((9, 7), 24), two(*run)
    decoding = [begin(engine, prompt, 0) for prompt in short]
    for stream in decoding:
        next(stream)
    rounds = engine.get_server_info()["internal_states"][0]["forward_ct_decode"]
    before = entered(engine)
    prefilling = begin(engine, long, 1)
    next(prefilling)  # the first token comes with the last chunk
    assert engine.get_server_info()["internal_states"][0]["forward_ct_decode"] == rounds + 3
    for rows, step in zip((16, 16, 1), steps(engine, before), strict=True):
        tree = run[0]
        wide = tree or (1, 0, 1)
        draft = [2 * wide[1]] * (wide[0] - 1)  # nothing of the rank that prefills
        target, extend = max(rows, 2 * wide[2]), max(rows, 2 * (wide[0] + 1))
        assert gathers(step) == draft + [target] * LAYERS + ([extend] if tree else [])
    for stream, prompt in zip([*decoding, prefilling], [*short, long], strict=True):
        assert list(stream)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    check_idle(engine)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_gathers_count_tokens_and_not_requests(zoo, two, eager):
    """Five requests here, one there: each brings its draft tokens, padded to what the larger rank has."""
    engine, (depth, topk, nodes) = two(TREE, eager), TREE
    prompts = zoo.prompts(PROMPTS, 24) + zoo.prompts((8,), 24)
    streams = [begin(engine, prompt, rank) for prompt, rank in zip(prompts, (0, 0, 0, 0, 0, 1), strict=True)]
    for stream in [*streams, streams[0]]:  # prefill, and a round that may have to capture
        next(stream)
    before = entered(engine)
    next(streams[0])
    [step] = steps(engine, before)
    bs = 5 if eager else 6  # captured are 1, 2, 3, 4, 6 and 8
    assert gathers(step) == [bs * topk] * (depth - 1) + [bs * nodes] * LAYERS + [bs * (depth + 1)]
    for stream, prompt in zip(streams, prompts, strict=True):
        assert list(stream)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=24)


def test_text_streams_and_stops_inside_a_run(zoo, one, two):
    """A rank finds stop strings itself, wherever in an accepted run they lie, and the text ends there."""
    engine, alone = (made(TREE, skip_tokenizer_init=False) for made in (two, one))
    prompt = "the stop 12"
    text = alone.generate(prompt, GREEDY)["text"]
    params = GREEDY | {"stop": text[10:12]}
    wanted, got = (each.generate(prompt, params) for each in (alone, engine))
    assert wanted["meta_info"]["finish_reason"]["matched"] == text[10:12]
    assert told(got) == told(wanted)
    pieces = [r["text"] for r in engine.generate(prompt, params, stream=True)]
    assert pieces[-1] == wanted["text"] and len(pieces) > 1
    assert all(later.startswith(piece) for piece, later in itertools.pairwise(pieces))


def test_aborts_and_flushes_reach_the_ranks(zoo, two):
    engine, prompts = two(TREE), zoo.prompts(PROMPTS[:3], 24)
    streams = [begin(engine, prompt, rank) for prompt, rank in zip(prompts, (0, 1, 1), strict=True)]
    for stream in streams:
        next(stream)
    assert engine.flush_cache() is False, "requests run"
    streams.pop(1).close()  # a dropped iterator
    rid = next(streams[1])["meta_info"]["id"]
    assert engine.abort_request(rid) and not engine.abort_request(rid)
    final = list(streams[1])[-1]
    assert final["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by the caller"}
    assert final["output_ids"] == zoo.r0(prompts[2], max_new_tokens=24)[: len(final["output_ids"])] != []
    again = engine.generate(input_ids=prompts[2], sampling_params=GREEDY, rid=rid, routed_dp_rank=1)
    assert again["output_ids"] == zoo.r0(prompts[2], max_new_tokens=24)
    assert list(streams[0])[-1]["output_ids"] == zoo.r0(prompts[0], max_new_tokens=24)
    check_idle(engine)
    assert engine.flush_cache()
    info = engine.get_server_info()
    assert info["evictable_size"] == info["num_finished"] == 0


def test_a_request_ended_before_its_rank_heard_of_it(zoo, two):
    engine, prompt = two(TREE), zoo.prompts((9,), 24)[0]
    begin(engine, prompt, 1).close()
    with pytest.raises(ValueError, match="still runs"):
        engine.generate(input_ids=[prompt, prompt], rid=["a", "b"], stream=True).close()
        stream = engine.generate(input_ids=prompt, rid="a", stream=True)
        engine.generate(input_ids=prompt, rid="a")
    stream.close()
    too_long = engine.generate(input_ids=[5] * 200, sampling_params={"max_new_tokens": 1}, routed_dp_rank=1)
    assert too_long["meta_info"]["finish_reason"]["type"] == "length"
    check_idle(engine)


def test_threads_share_the_ranks(zoo, two):
    engine, prompts, got = two((3, 1, 4)), zoo.prompts(PROMPTS, 24), {}

    def run(i: int) -> None:
        got[i] = engine.generate(input_ids=prompts[i], sampling_params=GREEDY)["output_ids"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: zoo.r0(prompt, max_new_tokens=24) for i, prompt in enumerate(prompts)}
    check_idle(engine)


def test_an_interrupted_call_leaves_the_ranks_whole(zoo, two, monkeypatch):
    """Ctrl-C while the ranks run a step: they finish it, forget the requests, and serve the next call."""
    engine, prompt = two(TREE), zoo.prompts((9,), 24)[0]
    real, calls = data_parallel_controller.wait, itertools.count()

    def wait(*args):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(data_parallel_controller, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=[prompt] * 3, sampling_params=GREEDY)
    result = engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    check_idle(engine)


def test_requests_take_turns_and_counters_add_up(zoo, two):
    engine, prompts = two(TREE), zoo.prompts(PROMPTS, 24)
    results = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    info = engine.get_server_info()
    states, metas = info["internal_states"], [r["meta_info"] for r in results]
    assert sorted(state["num_finished"] for state in states) == [2, 3]
    assert info["num_finished"] == 5 and info["dp_size"] == 2
    assert info["completion_tokens"] == 5 * 24 == sum(s["completion_tokens"] for s in states)
    assert info["spec_verify_ct"] == sum(meta["spec_verify_ct"] for meta in metas)
    histograms = [state["spec_correct_drafts_histogram"] for state in states]
    assert info["spec_correct_drafts_histogram"] == [
        sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)
    ]
    correct = sum(meta["spec_num_correct_drafts"] for meta in metas)
    assert info["avg_correct_drafts"] == pytest.approx(correct / info["spec_verify_ct"])
    assert info["max_total_num_tokens"] == 2 * 1024
    assert info["is_on"] == states[0]["is_on"]


@pytest.mark.parametrize("rank", [2, -1, True, 1.0, "0"])
def test_a_rank_that_is_not_there_is_refused(zoo, two, rank):
    engine = two(TREE)
    with pytest.raises(ValueError, match="this engine has ranks 0 to 1: name one or leave it out"):
        engine.generate(input_ids=[5, 6], routed_dp_rank=rank)
    assert engine.scheduler.is_idle()


def test_a_copied_stage_starts_its_own_ranks(zoo, tmp_path):
    """The ranks are found by where the stage lies, not by the name its package has in this process."""
    source = Stage("part4_worker").path
    shutil.copytree(source, tmp_path / "copied_stage", ignore=shutil.ignore_patterns("__pycache__"))
    stage, prompt = Stage(str(tmp_path / "copied_stage")), zoo.prompts((9,), 24)[0]
    with stage.Engine(**flags(zoo, TREE, **TWO_RANKS)) as engine:
        result = engine.generate(input_ids=prompt, sampling_params=GREEDY)
        assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
        [command] = {tuple(rank.process.args[1:4]) for rank in engine.scheduler.ranks}
    assert command == ("-P", "-m", "copied_stage.managers.dp_rank")


# Shards


@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "head"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_holds_its_part_of_every_mlp(zoo, monkeypatch, is_draft, ranks):
    """And all of everything else: the parts of all ranks, put together, are the checkpoint's matrices."""
    config = ModelConfig.from_path(
        str(zoo.head() if is_draft else zoo.target()), None, is_draft_model=is_draft
    )
    loaded = []
    for rank in range(ranks):
        monkeypatch.setattr(dp_attention, "_group", DPGroup(rank, ranks))
        model = load_model(config, load_kernels("native"), torch.float32, torch.device("cpu"))
        loaded.append(model.checkpoint_views())
    mlps = 0
    for name, whole in models.read_tensors(config.path).items():
        parts = [views[name] for views in loaded]
        if ".mlp." not in name:
            assert all(torch.equal(part, whole) for part in parts), name
            continue
        mlps += 1
        assert [part.numel() * ranks for part in parts] == [whole.numel()] * ranks
        dim = 1 if "down_proj" in name else 0
        assert torch.equal(torch.cat(parts, dim), whole), name
    assert mlps == 3 * config.num_hidden_layers


class Rehearsal(DPGroup):
    """One rank of two, whose other rank's rows and summands were worked out before."""

    def __init__(self, rank: int, gathered: torch.Tensor):
        super().__init__(rank, 2)
        self.gathered, self.partial, self.total = gathered, None, torch.zeros_like(gathered)

    def gather(self, x, rows=None):
        return self.gathered

    def scatter(self, partial, count):
        self.partial, first = partial, self.rank * len(partial) // 2
        return self.total[first : first + count]


def test_the_parts_of_an_mlp_add_up_to_the_whole(zoo, monkeypatch):
    """Biases once, the residual once, and rows that pad a gather nowhere, whatever they hold."""
    config = dataclasses.replace(ModelConfig.from_path(str(zoo.target()), None), mlp_bias=True)
    kernels = load_kernels("native")
    norm, whole = RMSNorm(config.hidden_size, 1e-5, kernels), LlamaMLP(config, kernels)
    for parameter in (norm.weight, *whole.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    tensors = whole.gate_up_proj.checkpoint_views("") | whole.down_proj.checkpoint_views("")
    own = [torch.randn(3, config.hidden_size), torch.randn(1, config.hidden_size)]
    padding = torch.full((2, config.hidden_size), torch.nan)
    groups = [Rehearsal(rank, torch.cat([*own, padding])) for rank in range(2)]
    for _ in ("rehearsed", "run"):
        results = []
        for group, rows in zip(groups, own, strict=True):
            monkeypatch.setattr(dp_attention, "_group", group)
            part = LlamaMLP(config, kernels)
            for name, view in (
                part.gate_up_proj.checkpoint_views("") | part.down_proj.checkpoint_views("")
            ).items():
                fill(view, tensors[name], name, "file")
            results.append(part(rows, norm, 3))
        groups[0].total = groups[1].total = groups[0].partial + groups[1].partial
    monkeypatch.setattr(dp_attention, "_group", None)
    for result, rows in zip(results, own, strict=True):
        torch.testing.assert_close(result, whole(rows, norm, None), rtol=1e-4, atol=1e-4)


def test_a_size_that_the_ranks_do_not_divide_is_refused(zoo, monkeypatch):
    """The target's before any rank starts, a head's where it is loaded."""
    with pytest.raises(ValueError, match=r"dp_size=5 does not divide the MLP's 96 rows"):
        Engine(**flags(zoo, TREE, enable_dp_attention=True, dp_size=5, tp_size=5))
    monkeypatch.setattr(dp_attention, "_group", DPGroup(0, 5))
    config = ModelConfig.from_path(str(zoo.head()), None, is_draft_model=True)
    with pytest.raises(ValueError, match=r"dp_size=5 does not divide the MLP's 96 rows"):
        load_model(config, load_kernels("native"), torch.float32, torch.device("cpu"))


def test_a_timeout_without_ranks_is_refused():
    with pytest.raises(ValueError, match="dist_timeout=5 is about ranks"):
        ServerArgs.from_kwargs(model_path="m", device="cpu", dist_timeout=5)


# One decision for all


class Hearsay:
    """A group whose exchange answers with what `others` said, this rank's own words first."""

    def __init__(self, *others):
        self.others = others

    def exchange(self, *mine):
        return np.array([mine, *self.others], dtype=np.int64)


WIDTHS = {"draft_width": 2, "target_width": 8, "draft_extend_width": 4}


def agreed(*ranks) -> list[GlobalStep | None]:
    """What each of the ranks, given as (prefill tokens, requests decoding), takes away."""
    return [
        GlobalStep.agree(Hearsay(*ranks[:i], *ranks[i + 1 :]), extend_tokens=tokens, decode_bs=bs, **WIDTHS)
        for i, (tokens, bs) in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    "ranks, rows, size",
    [
        (((0, 3), (0, 1)), (6, 24, 12), 4),
        (((0, 0), (0, 1)), (2, 8, 4), 1),  # an idle rank replays the busy one's graph
        (((0, 4), (0, 0)), (8, 32, 16), 4),
        (((0, 5), (0, 1)), (10, 40, 20), None),  # more than was captured, on one rank
        (((17, 0), (0, 1)), (2, 17, 17), None),  # a prefill beside a decode
        (((5, 0), (0, 3)), (6, 24, 12), None),
        (((17, 0), (9, 0)), (0, 17, 17), None),  # nobody decodes, so nobody drafts
        (((17, 0), (0, 0), (0, 2)), (4, 17, 17), None),
    ],
)
def test_all_ranks_take_the_same_step(ranks, rows, size):
    """Rows of draft, verification and draft extend are the most that a rank brings to each, known to all."""
    first, *others = agreed(*ranks)
    assert (first.draft_rows, first.target_rows, first.draft_extend_rows) == rows
    assert all(step == first for step in others)
    args = ServerArgs.from_kwargs(model_path="m", device="cpu", cuda_graph_bs=[1, 2, 4])
    graphs = CudaGraphRunner(args, [])
    assert [graphs.padded_size(bs, first) for _, bs in ranks] == [size] * len(ranks)


def test_without_work_there_is_no_step():
    assert agreed((0, 0), (0, 0)) == [None, None]


def test_more_rows_than_announced_are_an_error_and_not_a_hang():
    with pytest.raises(RuntimeError, match="rank 1 has 3 rows where it announced at most 2"):
        DPGroup(1, 2).gather(torch.zeros(3, 4), 2)


def test_an_idle_rank_brings_rows_of_the_models_own_type(one, monkeypatch):
    """A gather of rows of two types hangs, or mixes them up: in bfloat16 an idle rank's are bfloat16 too."""
    engine, group = one(TREE, eager=True, dtype="bfloat16"), alone(dp_attention)
    monkeypatch.setattr(dp_attention, "_group", group)
    step = GlobalStep(draft_rows=2, target_rows=8, draft_extend_rows=4)
    with torch.inference_mode():
        engine.scheduler.draft_worker.forward_idle(step)
    rows = [(shape[0], dtype) for name, shape, dtype in group.log if name == "all_gather"]
    assert rows == [(rows, "bfloat16") for rows in [2] * (TREE[0] - 1) + [8] * LAYERS + [4]]


def test_the_rows_that_are_announced_are_those_that_run(zoo, one, monkeypatch):
    """Rows of a request in a draft forward, in verification and in the draft extend."""
    engine = one(TREE, eager=True)
    worker, seen = engine.scheduler.draft_worker, {}
    for runner in (worker.draft_model_runner, worker.target_worker.model_runner):
        real = runner.forward

        def forward(batch, real=real):
            seen[batch.forward_mode.name] = len(batch.input_ids)
            return real(batch)

        monkeypatch.setattr(runner, "forward", forward)
    engine.generate(input_ids=zoo.prompts((9,), 24), sampling_params=GREEDY)
    assert worker.rows_per_req() == tuple(seen[mode] for mode in ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND"))
