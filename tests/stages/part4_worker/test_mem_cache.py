"""Allocator, request table and radix cache against models that are correct by inspection."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stages.part4_worker.mem_cache.allocator import TokenToKVPoolAllocator
from stages.part4_worker.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from stages.part4_worker.mem_cache.radix_cache import RadixCache

PAGES = st.sampled_from([1, 2, 4, 16])
FEW = settings(max_examples=60, deadline=None)


def grow(allocator, slots, count):
    """Extend one owner's slots by `count`; returns the new list, or None."""
    new = allocator.alloc_extend(
        np.array([len(slots)]), np.array([len(slots) + count]), np.array([slots[-1] if slots else 0])
    )
    return None if new is None else slots + new.tolist()


# ---- allocator ----


class AllocatorMachine(RuleBasedStateMachine):
    """Owners grow, shrink to a whole page, leave, and try things that are then undone."""

    def __init__(self):
        super().__init__()
        self.page = 4
        self.allocator = TokenToKVPoolAllocator(64, self.page)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(1, 30))
    def arrive(self, count):
        self._extend([], count)

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99), count=st.integers(1, 30))
    def extend(self, pick, count):
        self._extend(self.owners.pop(pick % len(self.owners)), count)

    def _extend(self, slots, count):
        before = self.allocator.available_size()
        need = int(self.allocator.new_slots(np.array([len(slots)]), np.array([len(slots) + count])))
        grown = grow(self.allocator, slots, count)
        if need > before:
            assert grown is None and self.allocator.available_size() == before
        else:
            assert self.allocator.available_size() == before - need
            slots = grown
        if slots:
            self.owners.append(slots)

    @rule(counts=st.lists(st.integers(1, 20), min_size=1, max_size=4))
    def extend_all_at_once(self, counts):
        """Several owners in one call get what each would get alone: whole pages, continued tails."""
        chosen = self.owners[: len(counts)]
        counts = np.array(counts[: len(chosen)], dtype=np.int64)
        if not chosen:
            return
        prefix = np.array([len(s) for s in chosen])
        new = self.allocator.alloc_extend(prefix, prefix + counts, np.array([s[-1] for s in chosen]))
        if new is None:
            return
        parts = np.split(new, np.cumsum(counts)[:-1])
        self.owners[: len(chosen)] = [s + p.tolist() for s, p in zip(chosen, parts, strict=True)]

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99))
    def leave(self, pick):
        self.allocator.free(np.array(self.owners.pop(pick % len(self.owners))))

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99), keep=st.integers(1, 30))
    def give_back_a_tail_of_whole_pages(self, pick, keep):
        slots = self.owners[pick % len(self.owners)]
        keep = min(-(-keep // self.page) * self.page, len(slots))
        self.allocator.free(np.array(slots[keep:], dtype=np.int64))
        del slots[keep:]

    @precondition(lambda self: self.owners)
    @rule(pick=st.integers(0, 99), counts=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def try_and_undo(self, pick, counts):
        """Draft slots: after restore_state the next allocation hands out the very same slots again."""
        slots = self.owners[pick % len(self.owners)]
        state, size = self.allocator.backup_state(), self.allocator.available_size()
        attempts = []
        for _ in range(2):
            tried = slots
            for count in counts:
                tried = grow(self.allocator, tried, count) if tried is not None else None
            attempts.append(tried)
            self.allocator.restore_state(state)
            assert self.allocator.available_size() == size
        assert attempts[0] == attempts[1]

    @invariant()
    def one_owner_per_page_and_tokens_in_order(self):
        held = set()
        for slots in self.owners:
            for position, slot in enumerate(slots):
                assert slot % self.page == position % self.page, "a position keeps its place inside a page"
                assert slot // self.page == slots[position - position % self.page] // self.page
            pages = {slot // self.page for slot in slots}
            assert 0 not in pages and not held & pages
            held |= pages
        assert self.allocator.available_size() == self.allocator.size - len(held) * self.page


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@FEW
@given(page=PAGES, size=st.integers(1, 200))
def test_allocator_hands_out_each_slot_once_and_never_the_padding_page(page, size):
    allocator = TokenToKVPoolAllocator(size, page)
    assert allocator.size == size // page * page == allocator.available_size()
    taken = []
    while (slots := grow(allocator, [], page)) is not None:
        taken += slots
    assert sorted(taken) == list(range(page, page + allocator.size))


@pytest.mark.parametrize("page", [1, 4])
def test_double_free_raises(page):
    allocator = TokenToKVPoolAllocator(32, page)
    slots = np.array(grow(allocator, [], 6))
    allocator.free(slots)
    with pytest.raises(RuntimeError, match="twice"):
        allocator.free(slots)
    assert allocator.available_size() == allocator.size


@pytest.mark.parametrize("slot", [0, 33 + 4, -1])
def test_slots_outside_the_pool_cannot_be_freed(slot):
    allocator = TokenToKVPoolAllocator(32, 1)
    grow(allocator, [], 32)
    with pytest.raises(RuntimeError, match="outside"):
        allocator.free(np.array([slot]))


def test_single_slots_are_taken_whole_or_not_at_all():
    allocator = TokenToKVPoolAllocator(8, 1)
    first, state = allocator.alloc(5), allocator.backup_state()
    assert allocator.alloc(4) is None and allocator.available_size() == 3
    scratch = allocator.alloc(3)
    allocator.restore_state(state)
    second = allocator.alloc(3)
    assert second.tolist() == scratch.tolist() and sorted([*first, *second]) == list(range(1, 9))
    allocator.free(first)
    assert sorted(allocator.alloc(5)) == sorted(first)


def test_restore_after_a_free_raises():
    """What was freed in between lies above the old top: restoring would hand it out twice."""
    allocator = TokenToKVPoolAllocator(8, 1)
    first = np.array(grow(allocator, [], 3))
    state = allocator.backup_state()
    grow(allocator, [], 2)
    allocator.free(first)
    with pytest.raises(RuntimeError):
        allocator.restore_state(state)


def test_freeing_nothing_is_allowed():
    allocator = TokenToKVPoolAllocator(8, 4)
    allocator.free(np.empty(0, np.int64))
    assert allocator.available_size() == 8


# ---- tables ----


def test_request_rows_are_handed_out_once():
    pool = ReqToTokenPool(3, 10, torch.device("cpu"))
    rows = pool.alloc(3)
    assert sorted(rows) == [1, 2, 3], "row 0 belongs to padding"
    assert pool.alloc(1) is None and pool.available_size() == 0
    pool.free(rows[1])
    with pytest.raises(RuntimeError, match="twice"):
        pool.free(rows[1])
    assert pool.alloc(2) is None and pool.alloc(1) == [rows[1]]


@FEW
@given(st.data())
def test_moving_kv_is_a_gather_then_a_scatter(data):
    """Accepted rows move to the front of their own slots, so source and destination overlap."""
    pool = MHATokenToKVPool(12, 2, 1, 2, torch.float32, torch.device("cpu"))
    pool.k_buffer.copy_(torch.arange(48).view(2, 12, 1, 2))
    pool.v_buffer.copy_(-pool.k_buffer)
    dst = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    src = data.draw(st.lists(st.integers(0, 11), min_size=len(dst), max_size=len(dst)))
    before = pool.k_buffer.clone()
    pool.move_kv_cache(torch.tensor(dst), torch.tensor(src))
    for slot in range(12):
        want = before[:, src[dst.index(slot)] if slot in dst else slot]
        assert torch.equal(pool.k_buffer[:, slot], want) and torch.equal(pool.v_buffer[:, slot], -want)


# ---- radix cache ----


def make_cache(page, is_eagle=False, size=256, disable=False):
    rows = ReqToTokenPool(4, 64, torch.device("cpu"))
    allocator = TokenToKVPoolAllocator(size, page)
    return RadixCache(rows, allocator, page, is_eagle, disable), allocator, rows


class RadixMachine(RuleBasedStateMachine):
    """The tree against a dictionary from whole-page prefixes of the key to the slots of their last page."""

    page, is_eagle = 2, False

    def __init__(self):
        super().__init__()
        self.cache, self.allocator, _ = make_cache(self.page, self.is_eagle)
        self.truth: dict[tuple, tuple] = {}
        self.locks: list = []

    def pages(self, key):
        return [tuple(key[: end + self.page].tolist()) for end in range(0, len(key), self.page)]

    def expected(self, key):
        slots = []
        for prefix in self.pages(key):
            if prefix not in self.truth:
                break
            slots += self.truth[prefix]
        return slots

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)

    @rule(tokens=tokens)
    def insert(self, tokens):
        key = self.cache.make_key(tokens, len(tokens) - self.is_eagle)
        if not len(key):
            return
        slots = grow(self.allocator, [], len(key))
        if slots is None:
            return
        had = self.cache.insert(key, np.array(slots))
        assert had == len(self.expected(key))
        self.allocator.free(np.array(slots[:had], dtype=np.int64))
        for number, prefix in enumerate(self.pages(key)):
            self.truth.setdefault(prefix, tuple(slots[number * self.page : (number + 1) * self.page]))

    @rule(tokens=tokens, keep=st.booleans())
    def match(self, tokens, keep):
        entries = len(tokens) - self.is_eagle
        result = self.cache.match_prefix(tokens, entries)
        assert result.device_indices.tolist() == self.expected(self.cache.make_key(tokens, entries))
        if keep and len(result.device_indices):
            self.cache.inc_lock_ref(result.last_node)
            self.locks.append(
                (result.last_node, self.cache.make_key(tokens, entries), result.device_indices.tolist())
            )

    @precondition(lambda self: self.locks)
    @rule(pick=st.integers(0, 99))
    def unlock(self, pick):
        self.cache.dec_lock_ref(self.locks.pop(pick % len(self.locks))[0])

    @rule(count=st.integers(1, 20))
    def evict(self, count):
        evictable, free = self.cache.evictable_size(), self.allocator.available_size()
        self.cache.evict(count)
        freed = self.allocator.available_size() - free
        assert freed >= min(count, evictable) and self.cache.evictable_size() == evictable - freed
        left = {slot for node in self.cache._nodes() for slot in node.value.tolist()}
        self.truth = {prefix: slots for prefix, slots in self.truth.items() if set(slots) <= left}
        for prefix in self.truth:
            assert len(prefix) == self.page or prefix[: -self.page] in self.truth, (
                "a page without the one before it"
            )
        for _, key, slots in self.locks:
            assert self.expected(key)[: len(slots)] == slots, "a locked path was evicted"

    @invariant()
    def counters_and_owners(self):
        slots = [slot for node in self.cache._nodes() for slot in node.value.tolist()]
        assert len(set(slots)) == len(slots) == sum(map(len, self.truth.values()))
        assert self.cache.evictable_size() + self.cache.protected_size() == len(slots)
        assert self.allocator.available_size() + len(slots) == self.allocator.size
        locked = {slot for _, _, held in self.locks for slot in held}
        assert self.cache.protected_size() == len(locked)


class PairRadixMachine(RadixMachine):
    page, is_eagle = 2, True


class TokenRadixMachine(RadixMachine):
    page, is_eagle = 1, False


for machine in (RadixMachine, PairRadixMachine, TokenRadixMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestRadixMachine = RadixMachine.TestCase
TestPairRadixMachine = PairRadixMachine.TestCase
TestTokenRadixMachine = TokenRadixMachine.TestCase


@pytest.mark.parametrize("page", [1, 4])
def test_pair_keys_lose_exactly_the_entry_whose_next_token_differs(page):
    """Entry p was computed from token p + 1 too: prompts that part after position p share p entries, not p +
    1.
    """
    first, second = [7] * 8 + [1, 2, 3, 4, 5], [7] * 8 + [9, 2, 3, 4, 5]
    for is_eagle, shared in ((False, 8), (True, 7)):
        cache, allocator, _ = make_cache(page, is_eagle)
        key = cache.make_key(first, 12)
        cache.insert(key, np.array(grow(allocator, [], len(key))))
        assert len(cache.match_prefix(second, 12).device_indices) == shared // page * page
        assert len(cache.match_prefix(first, 12).device_indices) == 12


def test_least_recently_used_goes_first():
    cache, allocator, _ = make_cache(1)
    for start in (10, 20, 30):
        cache.insert(cache.make_key([start, start + 1], 2), np.array(grow(allocator, [], 2)))
    cache.match_prefix([10, 11], 2)
    cache.evict(2)
    assert [len(cache.match_prefix([s, s + 1], 2).device_indices) for s in (10, 20, 30)] == [2, 0, 2]


def test_pair_keys_do_not_collide():
    cache, _, _ = make_cache(1, True)
    assert len(set(cache.make_key([0, 1, 0, 2, 1, 1, 2**31 - 1, 0], 7).tolist())) == 7


def make_req(rows, allocator, cache, tokens, output):
    """A request whose prompt has run: prefix matched and locked, the rest in slots of its own."""
    ids = tokens + output
    match = cache.match_prefix(ids, len(tokens) - 1)
    cache.inc_lock_ref(match.last_node)
    slots = match.device_indices.tolist()
    prefix, kv_len = len(slots), len(ids) - 1
    slots = grow(allocator, slots, kv_len - prefix)
    (row,) = rows.alloc(1)
    rows.req_to_token_host[row, :kv_len] = slots
    return SimpleNamespace(
        req_pool_idx=row,
        kv_len=kv_len,
        prefix_len=prefix,
        last_node=match.last_node,
        all_token_ids=lambda: ids,
    )


@FEW
@given(data=st.data(), page=PAGES, is_eagle=st.booleans(), disable=st.booleans())
def test_requests_leave_no_slot_behind(data, page, is_eagle, disable):
    """Requests with overlapping prompts finish, some after sharing early: free + evictable == capacity."""
    cache, allocator, rows = make_cache(page, is_eagle, size=1024, disable=disable)
    running = []
    for _ in range(data.draw(st.integers(1, 6))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=24))
        output = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        if rows.available_size() == 0:
            cache.cache_finished_req(running.pop(0))
        req = make_req(rows, allocator, cache, tokens, output)
        if data.draw(st.booleans()):
            cache.cache_unfinished_req(req)
            held = rows.req_to_token_host[req.req_pool_idx, : req.prefix_len]
            assert req.prefix_len % page == 0 and np.array_equal(
                held, cache.match_prefix(req.all_token_ids(), req.prefix_len).device_indices
            )
        running.append(req)
    for req in running:
        cache.cache_finished_req(req)
        assert req.req_pool_idx is None
    assert cache.protected_size() == 0 and rows.available_size() == rows.size
    assert allocator.available_size() + cache.evictable_size() == allocator.size
    cache.evict(10**6)
    assert allocator.available_size() == allocator.size
