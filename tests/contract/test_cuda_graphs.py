"""Graph or eager, and whatever pads a batch: tokens, accept counts and forwards are the same.

On a CPU the runner does all but record, so static inputs, padding, stale rows and decisions are tested here.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped

pytestmark = pytest.mark.needs("cuda_graph")

PLAIN, CHAIN, TREE = None, (3, 1, 4), (3, 4, 8)
shapes = pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=tree_id)
# Five requests that end one after the other: the batch shrinks through the sizes 8, 4 and 2 to 1.
LENGTHS, ENDS = (5, 9, 7, 12, 3), [{"max_new_tokens": n} for n in (4, 9, 14, 19, 24)]
SIZES = [1, 2, 4, 8]
EAGER = {"disable_cuda_graph": True}
NAN = float("nan")
ROUNDS = ("spec_verify_ct", "spec_correct_drafts_histogram")
VERIFY = ("verify", "verify_logits")


@contextlib.contextmanager
def replays(engine, see=None):
    """A list that fills with the key of every replay; `see(key)` is called before each."""
    graphs, keys = engine.scheduler.graphs, []
    real = graphs.replay

    def replay(key):
        keys.append(key)
        if see is not None:
            see(key)
        return real(key)

    with swapped(graphs, "replay", replay):
        yield keys


def starts_a_step(stage, key):
    """Whether a graph is the first of a step. Before trees came, only the verification of a round was one."""
    return key[0] in ("decode", "decode_logits", *(["draft"] if stage.has("tree") else VERIFY))


def first_sizes(stage, keys):
    """The sizes of a run's steps, in order."""
    return [key[1] for key in keys if starts_a_step(stage, key)]


def static_inputs(engine):
    """The packed inputs of each size."""
    worker = Probe(engine).draft_worker
    return engine.scheduler.tp_worker.decode_graphs.inputs if worker is None else worker.round_graphs.inputs


def forwards_of(engine, work):
    """What `work()` returns, and the forwards that it cost each model."""
    before = engine.get_server_info()["forward_ct"]
    result = work()
    after = engine.get_server_info()["forward_ct"]
    return result, {name: after[name] - before[name] for name in after}


def assert_same(done, want):
    assert done.tokens == want.tokens
    assert done.rounds == want.rounds


# ---- graph or eager ----


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE, (1, 1, 2)], ids=tree_id)
def test_graph_equals_eager(stage, engines, zoo, tree, page):
    """While the batch shrinks through every size; what prepares a size counts as no forward."""
    prompts = zoo.prompts(LENGTHS, 24)
    eager = engines.get(tree=tree, page_size=page, **EAGER)
    with replays(eager) as none:
        want, forwards = forwards_of(eager, lambda: run(eager, prompts, ENDS))
    assert none == [] and eager.get_server_info()["is_on"]["cuda_graph"] is False
    with engines.fresh(tree=tree, page_size=page, cuda_graph_bs=SIZES) as engine:
        with replays(engine) as keys:
            done, counted = forwards_of(engine, lambda: run(engine, prompts, ENDS))
        assert set(first_sizes(stage, keys)) == set(SIZES) and engine.get_server_info()["is_on"]["cuda_graph"]
    assert done.tokens == [zoo.r0(p, **end) for p, end in zip(prompts, ENDS, strict=True)]
    assert_same(done, want)
    assert counted == forwards


@shapes
def test_a_batch_over_the_largest_size_runs_eagerly(stage, engines, zoo, tree):
    """And joins the graphs once it is small enough, with the state that the eager rounds have left."""
    prompts = zoo.prompts(LENGTHS, 24)
    want = run(engines.get(tree=tree, **EAGER), prompts, ENDS)
    engine, rows = engines.get(tree=tree, cuda_graph_max_bs=2), []
    with replays(engine) as keys:
        done = run(engine, prompts, ENDS, before=lambda probe: rows.append(len(probe.running())))
    assert_same(done, want)
    assert first_sizes(stage, keys) == [bs for bs in rows if 0 < bs <= 2] and max(rows) == 5


@shapes
def test_sizes_that_no_batch_can_have_are_none(stage, engines, zoo, tree):
    with engines.fresh(tree=tree, cuda_graph_bs=[32], max_running_requests=4) as engine:
        assert engine.get_server_info()["is_on"]["cuda_graph"] is False
        prompts = zoo.prompts(LENGTHS, 24)
        with replays(engine) as keys:
            assert run(engine, prompts, {"max_new_tokens": 4}).tokens == [
                zoo.r0(p, max_new_tokens=4) for p in prompts
            ]
    assert keys == []


def mixed(vocab):
    """Every kind of request, and between them greedy ones; the first to end leave greedy ones alone."""
    return [
        {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 6},
        {"max_new_tokens": 24},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "max_new_tokens": 9},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01, "sampling_seed": 11, "max_new_tokens": 12},
        {"logit_bias": {str(vocab - 1): 4.0}, "min_new_tokens": 3, "max_new_tokens": 8},
    ]


@shapes
@pytest.mark.parametrize("scored", [False, True])
def test_whatever_requests_ask_for(stage, engines, zoo, tree, scored):
    """Sampling, penalties and scores are applied to a graph's logits, and only to those of real rows."""
    prompts = zoo.prompts(LENGTHS, 24)
    params = mixed(zoo.ref().vocab)
    more = {}
    if scored:
        more = {"return_logprob": [False, True, False, True, False], "top_logprobs_num": [0, 2, 0, 3, 0]}
    want = run(engines.get(tree=tree, **EAGER), prompts, params, **more)
    engine = engines.get(tree=tree, cuda_graph_bs=[8])
    with replays(engine) as keys:
        done = run(engine, prompts, params, **more)
    assert_same(done, want)
    for mine, other in zip(done.results, want.results, strict=True):
        scores = [result["meta_info"].get("output_token_logprobs") for result in (mine, other)]
        assert (scores[0] is None) == (scores[1] is None)
        for first, second in zip(*(s or [] for s in scores), strict=True):
            assert first[1] == second[1] and first[0] == pytest.approx(second[0], abs=1e-4)
    names = [name for name, _ in keys]
    assert "verify_logits" in names or "decode_logits" in names
    # When only greedy requests are left that want no scores, nobody needs logits.
    assert names[-2 if tree else -1] == {
        (False, False): "decode", (False, True): "decode_logits",
        (True, False): "verify", (True, True): "verify_logits",
    }[tree is not None, scored]  # fmt: skip


@shapes
def test_hidden_states_beside_greedy_requests(stage, engines, zoo, tree):
    """One request returns its states, so the batch leaves the greedy graph; later it goes back to it."""
    prompts = zoo.prompts(LENGTHS, 24)
    greedy = {"temperature": 0, "max_new_tokens": 24}

    def work(engine):
        stream = engine.generate(
            input_ids=prompts[0], sampling_params=greedy | {"max_new_tokens": 9},
            return_hidden_states=True, stream=True,
        )  # fmt: skip
        others = engine.generate(input_ids=prompts[1:], sampling_params=greedy)
        return [list(stream)[-1], *others]

    eager, engine = engines.get(tree=tree, **EAGER), engines.get(tree=tree, cuda_graph_bs=[8])
    want = work(eager)
    with replays(engine) as keys:
        done = work(engine)
    assert [r["output_ids"] for r in done] == [r["output_ids"] for r in want]
    states, expected = (np.array(results[0]["meta_info"]["hidden_states"]) for results in (done, want))
    assert states.shape == expected.shape == (9, zoo.ref().embed.shape[1])
    assert np.allclose(states, expected, atol=1e-4)
    names = {name for name, _ in keys}
    assert names >= ({"decode", "decode_logits"} if tree is None else {"verify", "verify_logits"})


# ---- padding and what was there before ----


@shapes
def test_padding_rows_are_neutral(stage, engines, zoo, tree):
    """Batches of 8, 7, 3, 5, 1 and 6 in static inputs of 1, 2, 4 and 8 rows that a larger batch has used."""
    prompts = zoo.prompts((5, 9, 7, 12, 3, 6, 8, 4), 6)
    with engines.fresh(tree=tree, cuda_graph_bs=SIZES) as engine:
        for bs in (8, 7, 3, 5, 1, 6):
            size, looked = min(s for s in SIZES if s >= bs), []

            def look(key, bs=bs, looked=looked):
                if starts_a_step(stage, key):
                    arrays = static_inputs(engine)[key[1]].host
                    looked.append((key[1], all(len(a) == key[1] and not a[bs:].any() for a in arrays)))
                    # Behind the first two stands what a step may have nothing of, such as new slots.
                    assert all(a[:bs, ...].any() for a in arrays[:2]), "the real rows are there"

            with replays(engine, look):
                done = run(engine, prompts[:bs], {"max_new_tokens": 6, "ignore_eos": True})
            assert done.tokens == [zoo.r0(p, max_new_tokens=6) for p in prompts[:bs]]
            assert looked[0] == (size, True) and all(neutral for _, neutral in looked)


@torch.inference_mode()
def spoil(probe):
    """Garbage into everything static that no request owns: inputs, results, and rows of the draft's state."""
    probe.poison()
    engine = probe.engine
    batch, worker = probe.scheduler.running_batch, probe.draft_worker
    if worker is not None:
        for chains in getattr(worker.round_graphs, "verify_inputs", {}).values():
            chains.draft_token.fill_(3)
    if worker is not None and hasattr(worker.round_graphs, "draft_input"):
        static, state = worker.round_graphs.draft_input, batch.spec_info
        owned = 0
        if state is not None and state.hidden_states.data_ptr() == static.hidden_states.data_ptr():
            owned = len(state.hidden_states)
        static.hidden_states[owned:] = static.topk_p[owned:] = NAN
        static.verified_id[owned:] = static.topk_index[owned:] = 3
    graphs = probe.scheduler.graphs
    for recorded in graphs._graphs.values():
        for tensor in tensors_of(recorded.result):
            tensor.fill_(NAN if tensor.is_floating_point() else 1)
    for buffer in static_inputs(engine).values():
        for array in buffer.host:
            array[...] = 2  # a row, a length and a slot that requests have
    if (futures := getattr(probe.scheduler, "future_map", None)) is not None:
        idle = sorted(set(range(1, futures.rows)) - {req.req_pool_idx for req in probe.holders()})
        futures.new_seq_lens_buf[idle] = 9
        futures.output_tokens_buf[[0, *idle]] = 3
        for rows in futures.draft_state.values():
            rows[[0, *idle]] = NAN if rows.is_floating_point() else 3
    for runner in probe.runners():
        if (prefills := runner.extend_graphs) is not None:
            prefills.packed.fill_(2)
            prefills.q_start_loc.fill_(2)
            if prefills.hidden_states is not None:
                prefills.hidden_states.fill_(NAN)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for item in vars(value).values():
            yield from tensors_of(item)


@pytest.mark.parametrize("page", [1, 4])
@shapes
def test_stale_rows_change_nothing(stage, engines, zoo, tree, page):
    """A batch of 3 shrinks to 2 and grows to 4; before each step all that is stale is spoilt."""
    prompts = zoo.prompts(LENGTHS, 24)[:4]

    def params(*ends):
        return [{"temperature": 0, "max_new_tokens": n} for n in ends]

    def work(engine, before=None):
        with Probe(engine).watch(before=before):
            stream = engine.generate(
                input_ids=prompts[:3], sampling_params=params(4, 24, 22), rid=list("abc"), stream=True
            )
            last = {}
            for item in stream:
                last[item["index"]] = item
                if len(item["output_ids"]) > 12:
                    break
            others = engine.generate(input_ids=prompts[3:] * 2, sampling_params=params(9, 16))
            last |= {item["index"]: item for item in stream}
        return [last[i] for i in range(3)] + others

    want = work(engines.get(tree=tree, page_size=page, **EAGER))
    engine = engines.get(tree=tree, page_size=page, cuda_graph_bs=[2, 4])
    with replays(engine) as keys:
        done = work(engine, before=lambda: spoil(Probe(engine)))
    for prompt, mine, other in zip([*prompts, prompts[3]], done, want, strict=True):
        assert mine["output_ids"] == other["output_ids"]
        assert mine["output_ids"] == zoo.r0(prompt, max_new_tokens=len(mine["output_ids"]))
        assert [mine["meta_info"].get(name) == other["meta_info"].get(name) for name in ROUNDS] == [True] * 2
    sizes = first_sizes(stage, keys)
    assert [a for a, b in zip(sizes, [*sizes[1:], 0], strict=True) if a != b] == [4, 2, 4, 2]


@shapes
def test_any_size_that_holds_the_batch_gives_the_same(stage, engines, zoo, tree):
    """Ranks will agree on a size: the next round may be larger than the last although no row has come."""
    prompts = zoo.prompts(LENGTHS, 24)[:2]
    want = run(engines.get(tree=tree, **EAGER), prompts, {"max_new_tokens": 24})
    with engines.fresh(tree=tree, cuda_graph_bs=SIZES) as engine:
        graphs, step, choices = engine.scheduler.graphs, [0], [2, 8, 4, 2, 4, 8]
        real = graphs.padded_size

        def before(probe):
            step[0] += 1

        def padded_size(bs, *others):
            return real(max(bs, choices[step[0] % len(choices)]), *others)

        with swapped(graphs, "padded_size", padded_size), replays(engine) as keys:
            done = run(engine, prompts, {"max_new_tokens": 24}, before=before)
        assert set(first_sizes(stage, keys)) == {2, 4, 8}
    assert_same(done, want)


@pytest.mark.parametrize("page", [1, 4])
@shapes
def test_rows_come_and_go(stage, engines, zoo, tree, page):
    """Chunks, arrivals beside decoding rows and retraction: rounds stay what they are without graphs."""
    prompts = zoo.prompts((9, 12, 7, 14, 10, 3), 24)
    params = [{"max_new_tokens": n} for n in (24, 6, 24, 24, 20, 24)]
    flags = {"tree": tree, "page_size": page, "chunked_prefill_size": 12, "max_total_tokens": 112}
    eager, engine = engines.get(**flags, **EAGER), engines.get(**flags, cuda_graph_bs=[2, 3, 6])

    def optimist(probe):  # admission counts on short answers
        probe.scheduler.new_token_ratio = 0.1

    want, done = (run(e, prompts, params, before=optimist) for e in (eager, engine))
    assert_same(done, want)
    assert done.tokens == [zoo.r0(p, **n) for p, n in zip(prompts, params, strict=True)]
    counts = [e.get_server_info()["num_retractions"] for e in (eager, engine)]
    assert counts[0] == counts[1] > 0


def beams(engine, stage):
    """The slots of a step of 4 rows that begins."""
    arrays, scheduler = static_inputs(engine)[4].host, engine.scheduler
    if not stage.has("overlap"):
        return arrays[3]
    rows = torch.from_numpy(arrays[0]).unsqueeze(1)  # the slots were reserved: they stand in the table
    columns = scheduler.future_map.new_seq_lens_buf[rows] + torch.arange(scheduler.alloc_len_per_decode)
    return scheduler.req_to_token_pool.req_to_token[rows, columns].numpy()


@pytest.mark.parametrize("topk", [1, 4])
def test_the_largest_batch_at_the_context_limit(stage, engines, zoo, topk):
    """The last trees stick out over the end of each row of the table, and nothing out of the inputs."""
    prompts = [p[:20] for p in zoo.prompts((20, 21, 22, 23), 24)]
    tree, flags = (3, topk, 8 if topk > 1 else 4), {"context_length": 32, "max_running_requests": 4}
    want = run(engines.get(tree=tree, **flags, **EAGER), prompts, {"max_new_tokens": 64})
    engine = engines.get(tree=tree, cuda_graph_bs=[4], **flags)
    table, guard = engine.scheduler.req_to_token_pool.req_to_token, []

    def look(key):
        if starts_a_step(stage, key):
            slots = beams(engine, stage)
            guard.append(slots.shape)
            assert len(np.unique(slots[slots > 0])) == np.count_nonzero(slots)  # each beam has its own
            assert slots.max() <= engine.scheduler.token_to_kv_pool_allocator.size

    with replays(engine, look):
        done = run(engine, prompts, {"max_new_tokens": 64})
    assert_same(done, want)
    width = tree[2] if stage.has("overlap") else topk * 2 if stage.has("tree") else 4
    assert set(guard) == {(4, width)} and table.shape[1] >= 32 + tree[2]
    assert [len(t) for t in done.tokens] == [12] * 4


# ---- short prompts ----


# Lengths of the prompts of one batch → rows of the graph that reads them; None: too many rows or requests.
PREFILLS = {(100, 90, 60): 256, (5, 9, 7): 32, (17,): 32, (16,): 16, (1,): 16, (3,) * 8: 32, (3,) * 9: None,
            (100, 100, 57): None}  # fmt: skip


@shapes
def test_short_prompts_are_replayed(stage, engines, zoo, tree):
    """A long batch comes first, and what is static is spoilt before each, so that stale rows would show."""
    engine = engines.get(tree=tree, cuda_graph_bs=[1, 3])

    def look(key):
        if key[0].endswith("prefill"):
            runner = Probe(engine).runners()[key[0].startswith("draft")]
            starts = runner.extend_graphs.q_start_loc.tolist()
            assert starts == sorted(starts) and starts[-1] == rows, "requests behind the last have no rows"

    for lengths, size in PREFILLS.items():
        prompts, rows = zoo.prompts(lengths, 6), sum(lengths)
        assert engine.flush_cache()
        with replays(engine, look) as keys:
            done = run(engine, prompts, {"max_new_tokens": 6}, before=spoil, ref=zoo.ref(),
                       ref_head=zoo.ref_head() if tree else None)  # fmt: skip
        assert done.tokens == [zoo.r0(p, max_new_tokens=6) for p in prompts]
        names = ["prefill", "draft_prefill"] if tree and stage.has("tree") else ["prefill"]
        prefills = [key for key in keys if key[0].endswith("prefill")]
        assert prefills == ([] if size is None else [(name, (size, 8, size)) for name in names]), lengths


def test_a_prefill_needs_room_for_its_rows_its_requests_and_its_longest(stage, engines, zoo, monkeypatch):
    module = stage.module("model_executor.extend_cuda_graphs")
    monkeypatch.setattr(module, "_SHAPES", ((16, 1, 16), (16, 3, 12), (32, 1, 32), (32, 3, 12)))
    chosen = {}
    for lengths in ((9,), (13,), (4, 5), (13, 3), (10, 7), (20,), (13, 9), (4, 4, 4, 4), (12, 12, 9)):
        engine = engines.get(cuda_graph_bs=[1, 3], max_running_requests=5)
        assert engine.flush_cache()
        prompts = zoo.prompts(lengths, 3)
        with replays(engine) as keys:
            assert run(engine, prompts, {"max_new_tokens": 3}).tokens == [
                zoo.r0(p, max_new_tokens=3) for p in prompts
            ]
        chosen[lengths] = [shape for name, shape in keys if name == "prefill"]
    assert chosen == {
        (9,): [(16, 1, 16)], (13,): [(16, 1, 16)], (4, 5): [(16, 3, 12)], (13, 3): [], (10, 7): [(32, 3, 12)],
        (20,): [(32, 1, 32)], (13, 9): [], (4, 4, 4, 4): [], (12, 12, 9): [],
    }  # fmt: skip


def test_the_shapes_of_a_gpu_are_in_order(stage):
    """The first that fits is taken, and the last has the buffers' sizes."""
    for shapes in (module := stage.module("model_executor.extend_cuda_graphs"))._SHAPES, module._GPU_SHAPES:
        assert list(shapes) == sorted(shapes)
        assert shapes[-1][:2] == (max(rows for rows, *_ in shapes), max(bs for _, bs, _ in shapes))
        assert all(longest <= rows for rows, _, longest in shapes)


@shapes
def test_a_prompt_whose_tokens_are_scored_is_not(stage, engines, zoo, tree):
    engine, prompts = engines.get(tree=tree, cuda_graph_bs=[1, 3]), zoo.prompts((5, 9), 6)
    want = run(engines.get(tree=tree, **EAGER), prompts, return_logprob=True, logprob_start_len=0)
    with replays(engine) as keys:
        done = run(engine, prompts, return_logprob=True, logprob_start_len=0)
    assert_same(done, want)
    assert not {name for name, _ in keys} & {"prefill"}
    for mine, other in zip(done.results, want.results, strict=True):
        scores = [[s[0] for s in r["meta_info"]["input_token_logprobs"][1:]] for r in (mine, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("page", [1, 4])
@shapes
def test_cached_and_chunked_prompts(stage, engines, zoo, tree, page):
    """A prefill behind a prefix, and a chunk of a prompt, are replayed beside whole prompts."""
    prompts = zoo.prompts((40, 9, 21), 12)
    again = [[*prompts[0], 9, 10], *zoo.prompts((7,), 12), prompts[2]]
    flags = {"tree": tree, "page_size": page, "chunked_prefill_size": 16}
    eager, engine = engines.get(**flags, **EAGER), engines.get(**flags, cuda_graph_bs=[1, 3])
    for turn in (prompts, again):
        want, done = (run(e, turn, {"max_new_tokens": 12}) for e in (eager, engine))
        assert_same(done, want)
        hits = [[r["meta_info"]["cached_tokens"] for r in d.results] for d in (want, done)]
        assert hits[0] == hits[1]
    assert hits[0][0] >= 36


# ---- what a capture does ----


@shapes
def test_only_what_the_engine_runs_is_prepared(stage, engines, zoo, tree):
    prompts = zoo.prompts(LENGTHS, 24)[:3]
    with engines.fresh(tree=tree, cuda_graph_bs=SIZES) as engine:
        graphs = engine.scheduler.graphs
        assert graphs.sizes == SIZES and not graphs._graphs
        with replays(engine) as keys:
            run(engine, prompts, {"max_new_tokens": 4})
        names = {"decode", "decode_logits"} if tree is None else set(VERIFY)
        if tree is not None and stage.has("tree"):
            names |= {"draft", "draft_extend"}
        used = set(first_sizes(stage, keys))
        assert 4 in used and 8 not in used
        prepared = {key for key in graphs._graphs if not key[0].endswith("prefill")}
        assert prepared == {(name, size) for name in names for size in used}


def draft_rows(scheduler):
    """What the running requests bring along for their next round."""
    if (futures := getattr(scheduler, "future_map", None)) is not None:
        rows = (futures.new_seq_lens_buf, futures.output_tokens_buf, *futures.draft_state.values())
        return [t[1:] for t in rows]  # the padding row is anybody's
    info = scheduler.running_batch.spec_info
    return [] if info is None else [getattr(info, name) for name in info._ROWS]


@shapes
def test_preparing_a_size_leaves_no_trace(stage, engines, zoo, tree):
    """In the middle of a run: KV, table, pools and the draft's state of every request stay as they are."""
    prompts = zoo.prompts(LENGTHS, 24)[:3]
    with engines.fresh(tree=tree, cuda_graph_bs=SIZES) as engine:
        scheduler, steps = engine.scheduler, []

        def state(probe):
            runners = probe.runners()
            pools = [t[:, 1:].clone() for r in runners for t in vars(r.token_to_kv_pool).values()
                     if isinstance(t, torch.Tensor)]  # fmt: skip
            probe.settle()
            drafts = [rows.clone() for rows in draft_rows(scheduler)]
            tables = [scheduler.req_to_token_pool.req_to_token[1:].clone()]
            host = (probe.free_slots().tolist(), [r.forward_ct for r in runners])
            return [*pools, *drafts, *tables], host

        def before(probe):
            steps.append(None)
            if len(steps) == 4:
                (tensors, host), start = state(probe), len(scheduler.graphs._graphs)
                for size in (8, 2, 1):
                    scheduler.graphs._capture_size(size)
                assert len(scheduler.graphs._graphs) > start
                after, host_after = state(probe)
                assert host == host_after
                for old, new in zip(tensors, after, strict=True):
                    torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)

        done = run(engine, prompts, {"max_new_tokens": 24}, before=before)
    assert len(steps) > 4 and done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]


@shapes
def test_no_size_has_large_buffers_of_its_own(stage, engines, zoo, tree):
    """Logits of all sizes lie in one place, and so does what one round leaves to the next."""
    with engines.fresh(tree=tree, cuda_graph_bs=SIZES) as engine:
        graphs = engine.scheduler.graphs
        for size in SIZES:
            graphs._capture_size(size)
        name = "decode_logits" if tree is None else "verify_logits"
        results = [graphs.result((name, size)) for size in SIZES]
        logits = [(r[-1] if tree is None else r).next_token_logits for r in results]
        rows = 1 if tree is None else tree[2]
        assert [len(t) for t in logits] == [size * rows for size in SIZES]
        assert len({t.untyped_storage().data_ptr() for t in logits}) == 1
        if tree is not None and stage.has("tree") and not stage.has("overlap"):  # there it is the future map
            state = engine.scheduler.draft_worker.round_graphs.draft_input
            assert all(len(getattr(state, field)) == SIZES[-1] for field in state._ROWS)
            places = {id(state)}
            prompts = zoo.prompts(LENGTHS, 24)
            run(engine, prompts, ENDS, after=lambda probe: places.add(id(worker_state(probe))))
            assert len(places) == 1


def worker_state(probe):
    return probe.draft_worker.round_graphs.draft_input


# ---- what a round costs, and when the host waits ----


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize("flags", [{}, EAGER], ids=["graph", "eager"])
def test_the_host_waits_for_the_verification_only(stage, engines, zoo, flags, monkeypatch):
    """The read is on its way before the draft extend is launched, and is waited for after it."""
    device_io, events = stage.module("model_executor.device_io"), []
    engine, prompts = engines.get(tree=stage.shape, **flags), zoo.prompts((5, 9, 7), 16)

    def told(name, real):
        def call(self, *args):
            if not engine.scheduler.graphs.is_capturing:
                events.append(name)
            return real(self, *args)

        return call

    for name in ("copy", "wait"):
        monkeypatch.setattr(device_io.Readback, name, told(name, getattr(device_io.Readback, name)))
    counts, transfers = device_io.counts, []

    def before(probe):
        events.append("step")
        transfers.append(dict(counts))

    def after(probe):
        transfers[-1] = {name: counts[name] - transfers[-1][name] for name in counts}

    with contextlib.ExitStack() as stack:
        for runner in Probe(engine).runners():
            seen = told_forward(engine, events)
            stack.enter_context(swapped(runner, "forward", seen(runner.forward)))
        run(engine, prompts, {"max_new_tokens": 16}, before=before, after=after, check=False)
    phases = ["DECODE", "DECODE", "TARGET_VERIFY", "copy", "DRAFT_EXTEND"]
    if Probe(engine).overlaps:  # when the host waits, and for which round, is tested in tests/stages
        events = [event for event in events if event not in ("step", "wait")][3:]
        assert len(events) >= 20 and events == phases * (len(events) // 5)
        return
    rounds = [step.split() for step in " ".join(events).split("step")][2:]
    rounds = [r for r in rounds if r]
    assert len(rounds) >= 4
    for events in rounds:
        assert events == [*phases, "wait"]
    assert transfers[1] == transfers[2] == {"uploads": 1, "downloads": 1}


def told_forward(engine, events):
    def around(real):
        def forward(forward_batch):
            if not engine.scheduler.graphs.is_capturing:
                events.append(forward_batch.forward_mode.name)
            return real(forward_batch)

        return forward

    return around
