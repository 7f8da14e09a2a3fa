"""Slots reserved ahead of what the host knows, held until the request ends, and given back in one place."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from stages.spec_v2.kernels import load_kernels
from stages.spec_v2.managers.forward_stream import ForwardStream
from stages.spec_v2.managers.schedule_batch import Req, ScheduleBatch
from stages.spec_v2.managers.scheduler import Scheduler
from stages.spec_v2.mem_cache.allocator import TokenToKVPoolAllocator
from stages.spec_v2.mem_cache.memory_pool import ReqToTokenPool
from stages.spec_v2.mem_cache.radix_cache import RadixCache
from stages.spec_v2.model_executor.device_io import upload
from stages.spec_v2.sampling.sampling_params import SamplingParams
from stages.spec_v2.speculative.spec_info import SpeculativeAlgorithm
from tests.contract import drafters
from tests.contract.harness import run
from tests.contract.probe import Probe, swapped

from .lag import Lag


def batch_of(*prompts: int, page: int = 1, pool: int = 512) -> ScheduleBatch:
    """A batch whose requests have just prefilled prompts of these lengths, over real pools."""
    device = torch.device("cpu")
    rows = ReqToTokenPool(8, 400, device, load_kernels("native"))
    allocator = TokenToKVPoolAllocator(pool, page)
    tree = RadixCache(rows, allocator, page, lookahead=1)
    reqs = [
        Req(str(i), list(range(n)), SamplingParams(temperature=0), 1, frozenset(), 300)
        for i, n in enumerate(prompts)
    ]
    for req in reqs:
        req.init_next_round_input(tree)
        tree.inc_lock_ref(req.last_node)
    batch = ScheduleBatch(
        reqs, rows, allocator, tree, device, 400, SpeculativeAlgorithm.EAGLE, ForwardStream()
    )
    batch.prepare_for_extend()
    return batch


def test_the_numbers_of_the_fact_sheet():
    """A = 4: committed 100 → 108; the next step, nothing processed → 108; after 3 accepted, 103 → 111."""
    batch = batch_of(100)
    req = batch.reqs[0]
    for accepted, allocated in ((0, 108), (0, 108), (3, 111)):
        req.kv_len += accepted
        batch.prepare_for_decode(4)
        assert (req.kv_len, req.kv_allocated_len) == (100 + accepted, allocated)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_reservation_is_whole_pages_and_is_on_the_device(page):
    """After any run of accepted counts: pages held == pages reserved, every position has its own slot.

    The device's table has them when the step's job has entered what was sent with it.
    """
    rng = random.Random(page)
    batch = batch_of(5, 16, 31, page=page, pool=1024)
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool
    for _ in range(20):
        batch.prepare_for_decode(5)
        rows, _, *new_slots = upload(batch.device, *batch.get_model_worker_batch().decode_inputs)
        table.assign(rows, *new_slots)
        held = []
        for req in batch.reqs:
            assert req.kv_allocated_len % page == 0
            assert 10 <= req.kv_allocated_len - req.kv_len < 10 + 5 + page
            slots = table.req_to_token_host[req.req_pool_idx, : req.kv_allocated_len]
            assert table.req_to_token[req.req_pool_idx, : req.kv_allocated_len].tolist() == slots.tolist()
            assert all(
                a // page == b // page for a, b in zip(slots[::page], slots[page - 1 :: page], strict=True)
            )
            held += slots.tolist()
            req.kv_len += rng.randint(0, 5)
        assert len(set(held)) == len(held) == allocator.size - allocator.available_size()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("is_insert", [True, False])
def test_one_function_gives_all_of_it_back(page, is_insert):
    """What is known to be valid goes to the tree, the rest to the free list: used, scratch and never used."""
    batch = batch_of(9, 6, page=page)
    batch.prepare_for_decode(6)
    allocator, tree = batch.token_to_kv_pool_allocator, batch.tree_cache
    for req in batch.reqs:
        req.output_ids, req.kv_len = [200 + len(req.origin_input_ids), 7, 8], req.kv_len + 2
        tree.cache_finished_req(req, is_insert=is_insert)
    assert allocator.available_size() + tree.evictable_size() == allocator.size
    want = sum((n + 2) // page * page for n in (9, 6)) if is_insert else 0
    assert tree.evictable_size() <= want and (tree.evictable_size() > 0) == is_insert


def test_a_prompt_in_flight_has_no_pair_for_its_last_token():
    """Aborted before its first token is known: the last position's draft KV belongs to nobody's pair."""
    batch = batch_of(8, page=4)
    tree = batch.tree_cache
    tree.cache_finished_req(batch.reqs[0])
    assert tree.evictable_size() == 4, "whole pages of the 7 pairs that are known"
    assert batch.token_to_kv_pool_allocator.available_size() + 4 == 512


@pytest.mark.parametrize("tree, page", [(None, 1), ((3, 1, 4), 4), ((3, 2, 8), 1)])
def test_nothing_is_given_back_before_the_end(engines, zoo, tree, page):
    """A round frees no slot: what was rejected is written over by the next."""
    engine, freed = engines.get(tree=tree, page_size=page, disable_radix_cache=True), []
    allocator = engine.scheduler.token_to_kv_pool_allocator
    real = allocator.free

    def free(slots):
        freed.append(len(slots))
        return real(slots)

    with swapped(allocator, "free", free):
        run(engine, zoo.prompts((5, 9, 3), 24), [{"max_new_tokens": n} for n in (24, 10, 17)])
    assert len(freed) == 3, "once for each request"


@pytest.mark.parametrize(
    "tree, page, mind",
    [(None, 4, None), ((3, 1, 4), 4, "perfect"), ((3, 2, 8), 4, "perfect"), ((5, 4, 16), 1, None)],
)
def test_every_write_goes_to_a_slot_of_its_request(engines, zoo, tree, page, mind):
    """For all prompt lengths of some pages, with the device as far ahead as it can be, and a late stream."""
    engine = engines.get(tree=tree, page_size=page, disable_cuda_graph=True, disable_radix_cache=True)
    probe, wrong, seen = Probe(engine), [], []
    table = engine.scheduler.req_to_token_pool.req_to_token

    def wrote(args, kwargs, result):
        batch = args[0]
        rows, bs = batch.out_cache_loc.tolist(), len(batch.req_pool_indices)
        if batch.forward_mode.is_extend():
            return
        width = len(rows) // bs
        for i, row in enumerate(batch.req_pool_indices.tolist()):
            owned = set(table[row].tolist())  # zeros behind what was reserved
            for slot in rows[i * width : (i + 1) * width]:
                seen.append(slot)
                # Slot 0 takes rows behind an accepted path, which only a draft extend has.
                if slot not in owned or (slot == 0 and batch.forward_mode.name != "DRAFT_EXTEND"):
                    wrong.append((batch.forward_mode.name, row, slot))

    prompts = zoo.prompts(tuple(range(1, 17)), 12)
    with contextlib.ExitStack() as stack:
        stack.enter_context(Lag(engine, 3).open())
        for runner in probe.runners():
            stack.enter_context(probe.spy(runner, "forward", wrote))
        if mind is not None:
            stack.enter_context(getattr(drafters, mind)(probe, zoo.ref()))
        done = run(engine, prompts, {"max_new_tokens": 12}, check=False)
    assert done.tokens == [zoo.r0(p, max_new_tokens=12) for p in prompts]
    assert seen and wrong == []


def test_too_small_a_reservation_would_be_noticed(engines, zoo, monkeypatch):
    """With room for one step where two are under way, a round runs over the end of what is reserved."""
    real, process = ScheduleBatch.reserved_lens, Scheduler._process

    def late(scheduler):
        scheduler.forward_stream.wait_for_reads()  # the next reservation must not come in time for this round
        process(scheduler)

    def short(batch, alloc_len):
        now, _ = real(batch, alloc_len)
        need = np.array([r.kv_len for r in batch.reqs]) + alloc_len
        return now, np.maximum(now, need)

    monkeypatch.setattr(Scheduler, "_process", late)
    monkeypatch.setattr(ScheduleBatch, "reserved_lens", short)
    prompts = zoo.prompts((5, 9, 7), 24)
    with engines.fresh(tree=(3, 1, 4)) as engine, drafters.perfect(Probe(engine), zoo.ref()):
        done = run(engine, prompts, {"max_new_tokens": 24}, check=False)
    assert done.tokens != [zoo.r0(p, max_new_tokens=24) for p in prompts]
