"""Attention against loops over single numbers, with NaN wherever nothing may be read."""

import importlib
import math

import pytest
import torch

from stages.part4_worker.kernels import HostMetadata

pytestmark = pytest.mark.slow

NAN = float("nan")


class Case:
    """Requests with their keys scattered over a pool that is otherwise NaN."""

    def __init__(self, heads, dim, page, requests, words=0, garbage=NAN):
        """requests: (prefix_len, q_len, kv_len) each; words: of a random tree mask, 0 if causal."""
        q_heads, kv_heads = heads
        generator = torch.Generator().manual_seed(1)
        self.requests, self.page, self.scale = requests, page, dim**-0.5
        pages = [-(-kv_len // page) for _, _, kv_len in requests]
        order = torch.randperm(sum(pages), generator=generator) + 1  # page 0 is never handed out
        slots = (sum(pages) + 1) * page
        self.k = torch.full((slots, kv_heads, dim), garbage)
        self.v = torch.full((slots, kv_heads, dim), garbage)
        width = max(kv_len for _, _, kv_len in requests) + 2 * page
        # Table entries that must not be followed point into page 0, which stays garbage.
        self.table = torch.zeros(len(requests) + 2, width, dtype=torch.int32)
        self.rows = (torch.randperm(len(requests) + 2, generator=generator))[: len(requests)]
        self.slot_lists = []
        for b, (_, _, kv_len) in enumerate(requests):
            mine, order = order[: pages[b]], order[pages[b] :]
            own = (mine.unsqueeze(1) * page + torch.arange(page)).flatten()[:kv_len]
            self.slot_lists.append(own.tolist())
            self.k[own] = torch.randn(kv_len, kv_heads, dim, generator=generator)
            self.v[own] = torch.randn(kv_len, kv_heads, dim, generator=generator)
            starts = range(0, kv_len, page)
            self.table[self.rows[b], list(starts)] = own[list(starts)].int()
        q_lens = [q_len for _, q_len, _ in requests]
        self.starts = [sum(q_lens[:b]) for b in range(len(requests) + 1)]
        self.q = torch.randn(sum(q_lens), q_heads, dim, generator=generator)
        self.mask = None
        if words:
            shape = (len(requests), max(q_lens), words)
            self.mask = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)

    def sees(self, b, i, p):
        prefix = self.requests[b][0]
        if self.mask is None:
            return p <= prefix + i
        if p < prefix:
            return True
        word, bit = divmod(p - prefix, 64)
        return word < self.mask.shape[2] and bool((int(self.mask[b, i, word]) >> bit) & 1)

    def oracle(self):
        k, v, q = (t.double().tolist() for t in (self.k, self.v, self.q))
        group = self.q.shape[1] // self.k.shape[1]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for b, (_, q_len, kv_len) in enumerate(self.requests):
            for i in range(q_len):
                slots = [self.slot_lists[b][p] for p in range(kv_len) if self.sees(b, i, p)]
                row = self.starts[b] + i
                for head in range(len(q[0]) if slots else 0):
                    query = q[row][head]
                    scores = [
                        self.scale * sum(x * y for x, y in zip(query, k[s][head // group], strict=True))
                        for s in slots
                    ]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for d in range(len(query)):
                        values = (w * v[s][head // group][d] for w, s in zip(weights, slots, strict=True))
                        out[row, head, d] = sum(values) / sum(weights)
        return out

    def run(self, kernels, device, dtype=torch.float32, host=None):
        def lengths(numbers):
            return torch.tensor(numbers, device=device)

        prefixes, q_lens, kv_lens = zip(*self.requests, strict=True)
        return kernels.attention(
            *(t.to(device, dtype) for t in (self.q, self.k, self.v)),
            self.table.to(device),
            self.rows.to(device),
            lengths(prefixes),
            lengths(kv_lens),
            lengths(self.starts),
            max(q_lens),
            self.scale,
            self.page,
            None if self.mask is None else self.mask.to(device),
            host,
        )


# heads (query, key), head dim, page size, requests (prefix, q, kv), words of the mask
CASES = {
    "decode": ((9, 3), 16, 1, [(p, 1, p + 1) for p in (0, 5, 62, 63, 64, 130)], 0),
    "decode, padded requests": ((4, 2), 16, 4, [(6, 1, 7), (0, 1, 0), (0, 1, 0)], 0),
    "prefill": ((4, 2), 16, 1, [(0, 5, 5), (0, 66, 66), (0, 1, 1)], 0),
    "chunks": ((3, 3), 64, 4, [(64, 3, 67), (7, 20, 27), (3, 0, 3), (128, 2, 130)], 0),
    "head dim 80, one key head": ((5, 1), 80, 16, [(30, 4, 34), (0, 17, 17)], 0),
    "several row blocks": ((8, 1), 16, 1, [(3, 20, 23), (70, 18, 88)], 0),
    "keys cut below the rows": ((4, 2), 16, 1, [(4, 5, 6), (8, 2, 5)], 0),
    "tree": ((9, 3), 16, 1, [(p, 8, p + 8) for p in (0, 1, 64, 100)], 1),
    "tree over pages": ((4, 2), 64, 16, [(15, 4, 19), (16, 4, 20), (33, 3, 36), (0, 4, 0)], 1),
    "tree, keys cut": ((3, 3), 16, 4, [(10, 4, 12), (9, 4, 6), (0, 4, 2)], 1),
    "tree of two words": ((4, 2), 16, 1, [(5, 70, 75), (0, 3, 70)], 2),
    "columns beyond the mask are hidden": ((4, 2), 16, 1, [(5, 3, 80)], 1),
}


def make(name, **more):
    return Case(*CASES[name], **more)


@pytest.fixture(scope="module")
def oracles():
    return {}


@pytest.mark.parametrize("name", CASES)
def test_attention(kernels, device, dtype, tolerance, oracles, name):
    case = make(name)
    if name not in oracles:
        oracles[name] = case.oracle()
    out = case.run(kernels, device, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), oracles[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["keys cut below the rows", "chunks", "tree over pages", "tree, keys cut"])
def test_what_lies_in_unused_slots_changes_no_bit(kernels, device, name):
    assert torch.equal(make(name).run(kernels, device), make(name, garbage=1e30).run(kernels, device))


def test_a_row_that_sees_nothing_is_zero(kernels, device):
    case = Case((4, 2), 16, 1, [(0, 3, 3), (0, 2, 2)], words=1)
    case.mask[:] = torch.tensor([1, 0, 0b101]).view(1, 3, 1)
    out = case.run(kernels, device)
    assert not out[[1, 4]].any() and out[[0, 2, 3]].abs().amin() > 0


def test_a_request_does_not_depend_on_the_others(kernels, device):
    whole = make("chunks")
    out = whole.run(kernels, device)
    alone = make("chunks")
    alone.q, alone.rows = whole.q[3:23], whole.rows[1:2]
    alone.requests, alone.starts = whole.requests[1:2], [0, 20]
    torch.testing.assert_close(alone.run(kernels, device), out[3:23], atol=1e-6, rtol=1e-6)


def test_a_fused_projection_needs_no_copy(kernels, device):
    case = make("decode, padded requests")
    expected = case.run(kernels, device)
    case.q = torch.cat((case.q.flatten(1), torch.randn(3, 5)), dim=1)[:, :64].view(3, 4, 16)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run(kernels, device), expected)


@pytest.mark.parametrize("name", ["decode, padded requests", "tree over pages"])
def test_a_steps_plan_is_made_once(kernels, native, device, name):
    case = make(name)
    prefixes, _, kv_lens = zip(*case.requests, strict=True)
    host = HostMetadata(list(kv_lens), list(prefixes), case.starts)
    first = case.run(kernels, device, host=host)
    plan = host.plan
    assert (plan is None) == (kernels is not native)
    case.k, case.v = case.k * 2, case.v * 3  # the next layer: the same lengths, other keys
    second = case.run(kernels, device, host=host)
    assert host.plan is plan
    assert torch.equal(first, make(name).run(kernels, device))
    assert torch.equal(second, case.run(kernels, device))


# ---- the prefix among several programs ----


@pytest.fixture
def triton_attention():
    return importlib.import_module("stages.part4_worker.kernels.triton.attention")


@pytest.fixture
def split(triton_attention, monkeypatch):
    """split(n): have every small launch split its prefixes n ways; returns a list of the splits it made."""

    def into(splits):
        made, kernel = [], triton_attention._attention_kernel

        class Watched:
            def __getitem__(self, grid):
                def launch(*args, **options):
                    made.append(options["SPLITS"])
                    return kernel[grid](*args, **options)

                return launch

        monkeypatch.setattr(triton_attention, "_INTERPRETED_SPLIT_GROUPS", 64)
        monkeypatch.setattr(triton_attention, "_SPLITS", splits)
        monkeypatch.setattr(triton_attention, "_attention_kernel", Watched())
        return made

    return into


CASES |= {
    # Five tiles of prefix, none, and less than one: parts that are whole, empty or begin behind the end.
    "long": ((2, 1), 16, 1, [(300, 1, 301), (0, 1, 1), (5, 1, 6)], 0),
    "long tree": ((3, 1), 16, 4, [(130, 5, 135), (3, 5, 8), (0, 5, 5), (64, 5, 67), (0, 5, 0)], 1),
    "long chunk": ((8, 1), 16, 16, [(200, 18, 218), (0, 5, 5)], 0),  # several row blocks
}


@pytest.mark.parametrize(
    "name, splits",
    [("long", 2), ("long", 4), ("long", 16), ("long tree", 2), ("long tree", 8), ("long chunk", 4)],
)
def test_splits(triton_kernels, device, dtype, tolerance, oracles, split, triton_attention, name, splits):
    """The parts add up, twice in a row, and leave the tickets at zero. What no part may read is NaN."""
    made, case = split(splits), make(name)
    if name not in oracles:
        oracles[name] = case.oracle()
    first = case.run(triton_kernels, device, dtype)
    second = case.run(triton_kernels, device, dtype)
    assert made == [splits] * 2
    torch.testing.assert_close(first.double().cpu(), oracles[name], atol=tolerance, rtol=tolerance)
    assert torch.equal(first, second)
    assert not triton_attention._tickets(device).any()


@pytest.fixture
def scratch(monkeypatch):
    """A list that fills with every one-dimensional tensor that is made; all new memory is NaN."""
    made, empty = [], torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options).fill_(NAN)
        if tensor.dim() == 1:
            made.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    return made


def test_splits_read_no_scratch_that_was_not_written(triton_kernels, device, split, monkeypatch, scratch):
    """What is in the scratch memory before, and whether its rows are real, changes no bit."""
    split(4)
    case = make("long tree")
    poisoned = case.run(triton_kernels, device)
    monkeypatch.undo()
    assert len(scratch) == 1 and scratch[0].isnan().any()
    monkeypatch.setattr(torch, "empty", torch.zeros)
    split(4)
    assert torch.equal(case.run(triton_kernels, device), poisoned)


def test_every_group_of_splits_has_scratch_of_its_own(triton_kernels, device, split, scratch):
    """Programs of one launch run side by side, if not in the interpreter."""
    split(4)
    make("long chunk").run(triton_kernels, device)
    (parts,) = scratch
    group = parts.view(2 * 5, 4, -1)  # two requests of up to five blocks of 32 rows, one key head
    assert (~group[:5].isnan()).any(-1).all()  # the first request has keys for all parts, in each block


def test_a_big_batch_is_not_split(triton_kernels, triton_attention, device, split, monkeypatch):
    made = split(16)
    triton_attention._tickets(device)  # before there seem to be so few groups
    for name in ("_SPLIT_GROUPS", "_INTERPRETED_SPLIT_GROUPS"):
        monkeypatch.setattr(triton_attention, name, 3)
    cases = [Case((1, 1), 16, 1, [(70, 1, 71)] * bs) for bs in (1, 3, 4, 5)]
    for case in cases:
        case.run(triton_kernels, device)
    assert made == [16, 16, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True])
def test_long_contexts_on_the_gpu(native, triton_kernels, device, dtype, tolerance, tree):
    requests = [(4000, 64, 4064), (0, 64, 64), (1021, 64, 1085)]
    if not tree:
        requests += [(0, 2048, 2048), (5000, 1, 5001)]
    case = Case((9, 3), 64, 16, requests, words=1 if tree else 0)
    torch.testing.assert_close(
        case.run(triton_kernels, device, dtype).float(),
        case.run(native, device, torch.float32),
        atol=tolerance,
        rtol=tolerance,
    )
