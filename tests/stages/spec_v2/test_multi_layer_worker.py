"""A head for each step: what each of them is given, and its KV when rows come and go."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stages.spec_v2.model_executor.forward_batch_info import ForwardBatch
from stages.spec_v2.speculative.build_eagle_tree import chain_links
from tests.contract import models
from tests.contract.harness import run
from tests.contract.probe import Probe
from tests.contract.reference import simulate

from .lag import Lag, poison_on_free, rush
from .test_storms import STEPS, weather

NEW = 24
SPEC, TREE, FLAG = models.MULTI_LAYER, (3, 1, 4), {"enable_multi_layer_eagle": True}
STORM = replace(models.BASE, name="base-multi_layer", modules=3)  # the same target as BASE


def test_a_rotation_stays_inside_each_request():
    """Spelled out row by row: requests of 3, 1 and 2 rows, the last with a row behind its end."""
    ids, last = torch.tensor([10, 11, 12, 20, 30, 31, 0]), torch.tensor([2, 3, 5])
    batch = SimpleNamespace(input_ids=ids, last_rows=last)
    rotated = ForwardBatch.rotate_input_ids(batch, torch.tensor([13, 21, 32])).tolist()
    assert rotated[:6] == [11, 12, 13, 21, 31, 32]
    assert ids.tolist() == [10, 11, 12, 20, 30, 31, 0], "the next module rotates what this one was given"


@pytest.mark.parametrize("nodes", [1, 4, 64])
def test_a_chain_has_the_links_of_a_tree_without_branches(nodes):
    depth, mask, index, below, beside = chain_links(2, nodes, torch.device("cpu"))
    assert depth.tolist() == [list(range(nodes))] * 2
    assert index.tolist() == [list(range(nodes)), list(range(nodes, 2 * nodes))]
    assert below.tolist() == [[*range(1, nodes), -1]] * 2 and set(beside.flatten().tolist()) == {-1}
    for i, word in enumerate(mask[1, :, 0].tolist()):
        assert [word >> j & 1 for j in range(nodes)] == [int(j <= i) for j in range(nodes)]


@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 4, "page_size": 4}], ids=["", "chunks"])
def test_what_each_module_reads(engines, zoo, flags):
    """The loop, one row at a time: at p module i has the token at p + 1 + i of its own request, which is the
    text's as far as that goes, and then what the modules before it have just proposed.
    """
    prompts = zoo.prompts((9, 2, 6, 13), NEW, SPEC)
    engine = engines.get(SPEC, tree=TREE, disable_cuda_graph=True, **FLAG, **flags)
    probe, texts, compared = Probe(engine), {}, defaultdict(int)
    said = [[*p, *zoo.r0(p, SPEC, max_new_tokens=NEW + 8, ignore_eos=True)] for p in prompts]

    def see(args, kwargs, result):
        batch, module = args[0], args[0].spec_info.module
        slots = batch.out_cache_loc.tolist()
        for i, row in enumerate(batch.req_pool_indices.tolist()):
            first, last = int(batch.q_start_loc[i]), int(batch.last_rows[i])
            if module == 0:  # which text this is, by what is read of it; and how far it is known
                ends = int(batch.positions[last]) + 2
                known = batch.known_next_tokens
                more = [] if known is None else [t for t in known[i].tolist() if t >= 0][1:]
                read = batch.input_ids[first : last + 1].tolist()
                text = next(t for t in said if t[ends - len(read) : ends] == read)
                texts[row] = [*text[:ends], *more]
            for r in range(first, last + 1):
                p = int(batch.positions[r])
                assert int(batch.input_ids[r]) == texts[row][p + 1 + module], (row, p, module)
                assert slots[r] == int(probe.rows.req_to_token[row, p])
                compared[module] += 1
            if len(texts[row]) == int(batch.positions[last]) + 2 + module:
                texts[row].append(int(result.topk_index[i, 0]))

    with probe.spy(probe.draft_runner, "forward", see):
        run(engine, prompts, {"max_new_tokens": NEW, "ignore_eos": True}, check=False)
    assert set(compared) == {0, 1, 2} and len(set(compared.values())) == 1 and compared[0] > 150


@pytest.mark.parametrize("module", range(3))
def test_a_module_reads_a_layer_of_its_own(engines, zoo, module):
    """Where one layer of the KV says nothing, the modules before it propose what they would have."""
    prompt = zoo.prompts((9,), NEW, SPEC)[0]
    engine = engines.get(SPEC, tree=TREE, disable_overlap_schedule=True, **FLAG)
    probe, seen = Probe(engine), []

    def proposals(layer):
        assert engine.flush_cache()
        state, kept = probe.scheduler.future_map.draft_state["topk_p"], []

        def spoil(probe):
            """Of all positions but those that the next draft extend writes."""
            pool = probe.draft_runner.token_to_kv_pool
            for req in probe.running():
                kept.append(state[req.req_pool_idx].clone())
                if layer is not None:
                    pool.v_buffer[layer, torch.from_numpy(probe.slots_of(req)[:5])] = 1e3

        run(engine, [prompt], {"max_new_tokens": 6}, check=False, after=spoil)
        return kept[1]  # of the first round's draft extend

    seen = (proposals(None) != proposals(module)).tolist()
    assert seen == [i >= module for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, pool, flags",
    [
        (1, 128, {"chunked_prefill_size": 8}),
        (4, 160, {"disable_cuda_graph": True, "chunked_prefill_size": 5}),
    ],
)
def test_a_storm(engines, zoo, page, pool, flags):
    """Requests that end, are aborted and pushed back; what is kept of them is what all modules would say."""
    with engines.fresh(
        STORM,
        tree=TREE,
        page_size=page,
        max_total_tokens=pool,
        max_running_requests=5,
        **FLAG,
        **flags,
    ) as engine:
        with poison_on_free(engine) as freed, Lag(engine, page).open() as lag:
            weathered = weather(engine, zoo, page, STEPS)
        assert lag.holds > 100 and len(freed) > 50 and weathered.pushed_back > 3
        probe = Probe(engine)
        probe.settle()
        probe.check_idle()
        probe.check_tree_kv(zoo.ref(), zoo.ref_head(STORM))
        assert engine.get_server_info()["avg_correct_drafts"] > 0.5


@pytest.mark.slow
def test_delays_change_nothing(engines, zoo):
    """Early or late: the same drafts, so the same rounds."""
    prompts = zoo.prompts((5, 9, 7, 12), NEW, SPEC) * 2
    engine, seen = engines.get(SPEC, tree=TREE, max_running_requests=3, **FLAG), []
    for seed in range(4):
        assert engine.flush_cache()
        with Lag(engine, seed, share=0.8).open() if seed else rush(engine):
            done = run(engine, prompts, {"max_new_tokens": NEW}, check=False)
        seen.append((done.tokens, done.rounds))
    assert all(one == seen[0] for one in seen)
    heads = zoo.ref_head(SPEC)
    assert seen[0][0] == [zoo.r0(p, SPEC, max_new_tokens=NEW) for p in prompts]
    assert seen[0][1] == [simulate(heads, p, o, *TREE) for p, o in zip(prompts, seen[0][0], strict=True)]
