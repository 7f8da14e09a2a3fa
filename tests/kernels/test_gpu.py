"""What only a GPU shows: kernels are not compiled per batch size and can be captured in a CUDA graph."""

import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, SLOTS, N, STEPS, TOPK = 3000, 576, 9, 3, 64, 4096, 8, 3, 4


class Round:
    """Fixed inputs of every kernel for a batch of bs requests of 20 + b tokens and N tree rows each."""

    def __init__(self, bs, device, dtype):
        def numbers(values):
            return torch.tensor(values, device=device)

        rows = bs * N
        self.device, self.bs = device, bs
        self.x, self.residual = torch.randn(2, rows, HIDDEN, device=device, dtype=dtype)
        self.weight = torch.ones(HIDDEN, device=device, dtype=dtype)
        self.qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=device, dtype=dtype)
        self.angles = torch.rand(128, DIM, device=device)
        self.pool = torch.randn(2, SLOTS, KV_HEADS, DIM, device=device, dtype=dtype)
        self.table = torch.zeros(bs, 128, dtype=torch.int32, device=device)
        self.requests = torch.arange(bs, device=device)
        self.prefixes = numbers([20 + b for b in range(bs)])
        self.slots = torch.arange(1, SLOTS, device=device)[: bs * 64].view(bs, 64)
        self.zeros = torch.zeros_like(self.requests)
        self.starts = torch.arange(bs + 1, device=device) * N
        self.kv_indptr = torch.cat([self.zeros[:1], (self.prefixes + N).cumsum(0)]).int()
        self.scores = torch.rand(bs, TOPK + TOPK * TOPK * 2, device=device)
        self.parents = numbers([[-1, *range(TOPK), *range(TOPK, 2 * TOPK)]] * bs)
        self.logits = torch.randn(rows, VOCAB, device=device)
        self.seeds = torch.arange(bs, device=device) + 100

    def __call__(self, kernels):
        y, summed = kernels.rms_norm(self.x, self.weight, 1e-5, self.residual)
        kernels.assign_req_to_token(self.table, self.requests, self.zeros, self.slots, self.zeros + 64)
        selected = kernels.top_k(self.scores, N - 1)[1].sort(-1).values
        tree = kernels.build_tree(selected, self.parents, TOPK, self.prefixes)
        mask, positions, *links = tree
        q, k, v = self.qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        k, v = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        q, k = kernels.apply_rotary(q.view(-1, HEADS, DIM), k, positions, self.angles)
        columns = self.prefixes.unsqueeze(1) + torch.arange(N, device=self.device)
        kernels.store_kv(k, v, self.pool[0], self.pool[1], self.slots.gather(1, columns).flatten())
        lengths = (self.prefixes, self.prefixes + N, self.starts)
        out = kernels.attention(
            q, self.pool[0], self.pool[1], self.table, self.requests, *lengths, N, DIM**-0.5, 1, mask
        )
        kv_indices = torch.zeros(self.bs * 128, dtype=torch.int32, device=self.device)
        kernels.create_kv_indices(self.table, self.requests, self.prefixes + N, self.kv_indptr, kv_indices, 1)
        custom_mask = torch.zeros(N * self.bs * 128, dtype=torch.uint8, device=self.device)
        kernels.create_custom_mask(mask, self.prefixes, self.kv_indptr, custom_mask, 128)
        gate = kernels.silu_and_mul(y)
        probs, ids = kernels.topk_softmax(self.logits, TOPK)
        targets = kernels.argmax(self.logits).view(self.bs, N)
        candidates = ids[:, 0].view(self.bs, N).roll(1, dims=1)
        full = torch.softmax(self.logits * 3, -1)
        greedy = kernels.verify_tree_greedy(candidates, targets, *links, STEPS)
        sampled = kernels.tree_speculative_sampling_target_only(
            candidates, full.view(self.bs, N, VOCAB), *links, self.seeds, self.prefixes, STEPS
        )
        numbers = kernels.philox_uniform(self.seeds, self.prefixes, 0)
        drawn = kernels.sample_from_probs(full[::N], self.seeds, self.prefixes)
        return [
            y,
            summed,
            out,
            kv_indices,
            custom_mask,
            gate,
            probs,
            ids,
            *tree,
            *greedy,
            *sampled,
            numbers,
            drawn,
        ]


def variants():
    """How many compiled kernels there are in all."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if ".kernels.triton" in name]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(cache[0]) for f in functions.values() for cache in f.device_caches.values())


def test_no_batch_size_compiles_anew(triton_kernels, device):
    Round(2, device, torch.bfloat16)(triton_kernels)
    before = variants()
    assert before > 10
    for bs in (1, 3, 16, 17, 32):
        Round(bs, device, torch.bfloat16)(triton_kernels)
    assert variants() == before


@pytest.mark.parametrize("bs", [1, 5])
def test_a_round_equals_the_native_twins(native, triton_kernels, device, dtype, tolerance, bs):
    step = Round(bs, device, dtype)
    for first, second in zip(step(native), step(triton_kernels), strict=True):
        assert first.dtype == second.dtype
        torch.testing.assert_close(second, first, atol=tolerance, rtol=tolerance)


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
    graph.replay()
    for first, second in zip(captured, other(triton_kernels), strict=True):
        assert torch.equal(first, second)
