"""What only a GPU shows: kernels are compiled for kinds of steps and not for batch sizes, and fit a graph."""

import importlib
import sys

import pytest
import torch

from stages.part4_worker.kernels.tree_types import Beams, Candidates
from stages.part4_worker.kernels.triton import fused_linear

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 3000, 576, 640, 9, 3, 64
SLOTS, N, STEPS, TOPK, EPS = 12800, 8, 3, 4, 1e-5


class Round:
    """Fixed inputs of every kernel for a batch of bs requests of 20 + b tokens and N tree rows each."""

    def __init__(self, bs, device, dtype):
        def numbers(values):
            return torch.tensor(values, device=device)

        def normal(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).to(device, dtype)

        rows = bs * N
        self.device, self.bs = device, bs
        self.x = normal(rows, HIDDEN)
        self.norm = normal(HIDDEN)
        self.qkv = normal((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, scale=HIDDEN**-0.5)
        self.qkv_bias = normal((HEADS + 2 * KV_HEADS) * DIM)
        self.o = normal(HIDDEN, HEADS * DIM, scale=(HEADS * DIM) ** -0.5)
        self.gate_up = normal(2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
        self.down = normal(HIDDEN, INNER, scale=INNER**-0.5)
        # Logits that are small whole numbers, so that rounding decides nothing.
        self.head = torch.zeros(VOCAB, HIDDEN, device=device, dtype=dtype)
        self.head[:, :16] = torch.randint(-2, 3, (VOCAB, 16)).to(device, dtype)
        self.last = torch.randint(-2, 3, (rows, HIDDEN)).to(device, dtype)
        self.angles = torch.rand(128, DIM, device=device)
        self.pool = normal(2, SLOTS, KV_HEADS, DIM)
        self.table = torch.zeros(bs, 256, dtype=torch.int32, device=device)
        self.requests = torch.arange(bs, device=device)
        self.prefixes = numbers([20 + 7 * b % 96 for b in range(bs)])
        self.slots = torch.arange(1, SLOTS, device=device)[: bs * 128].view(bs, 128)
        self.zeros = torch.zeros_like(self.requests)
        self.starts = torch.arange(bs + 1, device=device) * N
        self.kv_indptr = torch.cat([self.zeros[:1], (self.prefixes + N).cumsum(0)]).int()
        # Three levels of a draft.
        self.proposed_p = torch.rand(2, bs * TOPK, TOPK, device=device)
        self.proposed_ids = torch.randint(0, VOCAB, (2, bs * TOPK, TOPK), device=device)
        self.draft_slots = torch.arange(1, SLOTS, device=device)[-bs * 2 * TOPK :].view(bs, 2 * TOPK)
        self.column_bits = numbers([[1 << column] for column in range(2 * TOPK)])
        self.logits = torch.randn(rows, VOCAB, device=device)
        self.seeds = torch.arange(bs, device=device) + 100

    def __call__(self, kernels):
        """Every function of the set; returns what they return, and what they wrote."""
        kernels.assign_req_to_token(self.table, self.requests, self.zeros, self.slots, self.zeros + 128)
        levels = kernels.assign_draft_cache_locs(
            self.table, self.requests, self.prefixes + 64, self.draft_slots, TOPK
        )
        candidates = Candidates(
            torch.empty(self.bs, TOPK + 2 * TOPK * TOPK, device=self.device),
            self.proposed_ids.new_empty(self.bs, TOPK + 2 * TOPK * TOPK),
            self.proposed_ids.new_empty(self.bs, 1 + 2 * TOPK),
        )
        request_of_beam = self.requests[:, None].expand(-1, TOPK)
        first_p, first_ids = self.proposed_p[0, : self.bs], self.proposed_ids[0, : self.bs]
        ancestors = self.column_bits[:TOPK].expand(self.bs, -1, -1)
        beams = Beams(first_p, first_ids, request_of_beam, ancestors)
        proposals = list(zip(self.proposed_p, self.proposed_ids, strict=True))
        beams = kernels.grow_tree(candidates, 1, beams, *proposals[0], self.column_bits[TOPK:])
        tree = kernels.build_tree(candidates, 2, beams, *proposals[1], self.requests, self.prefixes, N)
        _, mask, positions, *links = tree
        paired = kernels.embed_with_hidden(
            beams.input_ids.flatten(), self.head, self.last, beams.hidden_rows.flatten()
        )
        columns = self.prefixes.unsqueeze(1) + torch.arange(N, device=self.device)
        loc = self.slots.gather(1, columns).flatten()
        fused = (self.qkv, self.qkv_bias, positions, self.angles, self.pool[0], self.pool[1], loc)
        q = kernels.norm_qkv_rotary_store(self.x, self.norm, EPS, *fused)
        k, v = self.pool[:, loc]
        lengths = (self.prefixes, self.prefixes + N, self.starts)
        attended = kernels.attention(
            q, self.pool[0], self.pool[1], self.table, self.requests, *lengths, N, DIM**-0.5, 1, mask
        )
        x = kernels.linear(attended.flatten(1), self.o, None, self.x)
        gated = kernels.norm_gate_up(x, self.norm, EPS, self.gate_up, None)
        out = kernels.linear(gated, self.down, None, x)
        # What the fused ones fall back to for many rows.
        normed = kernels.rms_norm(self.x, self.norm, EPS)
        silu = kernels.silu_and_mul(self.x)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
        again = kernels.rotary_store(qkv, positions, self.angles, self.pool[0], self.pool[1], loc)
        likely = kernels.linear_topk(self.last, self.head, TOPK)
        exact = kernels.linear_float32(self.last, self.head)
        kv_indices = torch.zeros(self.bs * 128, dtype=torch.int32, device=self.device)
        kernels.create_kv_indices(self.table, self.requests, self.prefixes + N, self.kv_indptr, kv_indices, 1)
        custom_mask = torch.zeros(N * self.bs * 128, dtype=torch.uint8, device=self.device)
        kernels.create_custom_mask(mask, self.prefixes, self.kv_indptr, custom_mask, 128)
        best, ids = kernels.top_k(self.logits, TOPK)
        targets = kernels.argmax(self.logits).view(self.bs, N)
        guesses = ids[:, 0].view(self.bs, N).roll(1, dims=1)
        full = torch.softmax(self.logits * 3, -1)
        known = (*links, loc.view(self.bs, N), self.prefixes, self.logits.sum(-1))
        greedy = kernels.verify_tree_greedy(guesses, targets, *known, STEPS)
        sampled = kernels.tree_speculative_sampling_target_only(
            guesses, full.view(self.bs, N, VOCAB), *known, self.seeds, self.prefixes, STEPS
        )
        numbers = kernels.philox_uniform(self.seeds, self.prefixes, 0)
        drawn = kernels.sample_from_probs(full[::N], self.seeds, self.prefixes)
        return [
            q, k, v, attended, x, gated, out, normed, silu, again, *likely, exact, best, ids, *tree, *greedy,
            *sampled, numbers, drawn, kv_indices, custom_mask, *levels, *candidates, *beams, paired,
        ]  # fmt: skip


def variants():
    """How many compiled kernels there are in all."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if ".kernels.triton" in name]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for f in functions.values() for cache in f.device_caches.values())


def kind(bs):
    """All that a batch size decides: the layers' plan, the head's tile, attention's programs and splits."""
    rows, attention = bs * N, importlib.import_module(f"{fused_linear.__package__}.attention")
    tile = next((size for size in (16, 32) if rows <= size), 64)
    programs = tuple(bs * KV_HEADS <= most for most, _ in attention._PROGRAMS)
    return (
        fused_linear.plan_for(rows, torch.bfloat16),
        tile,
        programs,
        bs * KV_HEADS <= attention._SPLIT_GROUPS,
    )


def test_no_batch_size_compiles_anew(triton_kernels, device):
    """The first batch of each kind compiles, every other of that kind finds what it needs."""
    kinds = {}
    for bs in range(1, 96):
        kinds.setdefault(kind(bs), []).append(bs)
    assert len(kinds) < 12
    for first, *_ in kinds.values():
        Round(first, device, torch.bfloat16)(triton_kernels)
    before = variants()
    assert before > 20
    for _, *others in kinds.values():
        for bs in others[-2:]:
            Round(bs, device, torch.bfloat16)(triton_kernels)
    assert variants() == before


@pytest.mark.parametrize("bs", [1, 2, 5, 33, 50, 90])
def test_a_round_equals_the_native_twins(native, triton_kernels, device, dtype, tolerance, bs):
    """By whole rows, by tiles of both heights, and by the library; attention by every kind of program."""
    step = Round(bs, device, dtype)
    for first, second in zip(step(native), step(triton_kernels), strict=True):
        assert first.dtype == second.dtype
        torch.testing.assert_close(second, first, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_few_rows_equal_the_native_twins(native, triton_kernels, device, dtype, tolerance, rows):
    """The plans for fewer rows than a tree has."""
    step = Round(1, device, dtype)
    x, residual = step.x[:rows], step.last[:rows, :HIDDEN]
    for kernels in (native, triton_kernels):
        y = kernels.linear(x, step.o, None, residual)
        gated = kernels.norm_gate_up(y, step.norm, EPS, step.gate_up, None)
        likely = kernels.linear_topk(step.last[:rows], step.head, TOPK)
        results = [y, gated, *likely]
        if kernels is native:
            expected = results
    for first, second in zip(expected, results, strict=True):
        torch.testing.assert_close(second, first, atol=2 * tolerance, rtol=2 * tolerance)


def test_a_round_in_a_cuda_graph(triton_kernels, device):
    step = Round(4, device, torch.bfloat16)
    step(triton_kernels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(triton_kernels)
    other = Round(4, device, torch.bfloat16)
    for name, value in vars(other).items():
        if isinstance(value, torch.Tensor):
            getattr(step, name).copy_(value)
    for _ in range(2):  # the tickets of a split attention are back at zero
        graph.replay()
    for first, second in zip(captured, other(triton_kernels), strict=True):
        assert torch.equal(first, second)


def test_a_kernel_that_starts_early_waits_for_its_inputs(triton_kernels, device):
    """Programmatic dependent launch: each of a chain of small kernels reads what the one before it wrote."""
    step, results = Round(1, device, torch.bfloat16), []
    for settle in (torch.cuda.synchronize, lambda: None):
        x = step.x[:1]
        for _ in range(200):
            gated = triton_kernels.norm_gate_up(x, step.norm, EPS, step.gate_up, None)
            settle()
            x = triton_kernels.linear(gated, step.down)
            settle()
        results.append(x)
    assert results[0].isfinite().all() and results[0].any() and torch.equal(*results)
