"""Linear layers with all that stands around them, by every plan, against float64 and single numbers."""

import pytest
import torch

from stages.part4_worker.kernels.triton import fused_linear
from tests.kernels import oracles
from tests.kernels.oracles import close, guarded, guarded_rows

pytestmark = pytest.mark.slow

EPS = 1e-5
NAN = float("nan")


def whole_rows(rows, dtype):
    return fused_linear.Plan("few_rows", 1 << (rows - 1).bit_length(), 16, 4)


# How each way comes by its plan. A row that is longer than what a program holds at a time is read in pieces.
PLANS_OF = {
    "native": None,
    "whole rows": whole_rows,
    "pieces": lambda rows, dtype: whole_rows(rows, dtype)._replace(block_k=16),
    "slices": lambda rows, dtype: fused_linear.Plan("sliced", 8, 16, 4, 16),
    "pieces of slices": lambda rows, dtype: fused_linear.Plan("sliced", 8, 16, 4, 16),
    "tiles": lambda rows, dtype: fused_linear.Plan("tiles", 16, 16, 4, 32, 2),
    "library": lambda rows, dtype: None,
}
ROWS = {
    "native": [5],
    "whole rows": [1, 2, 3, 5, 8],
    "pieces": [1, 3],
    "slices": [1, 8, 11],
    "pieces of slices": [5],
    "tiles": [1, 5, 35],
    "library": [3],
}


@pytest.fixture(params=PLANS_OF)
def way(request, native, triton_kernels, monkeypatch):
    """A set of kernels, made to take one way."""
    if request.param == "native":
        return native
    monkeypatch.setattr(fused_linear, "plan_for", PLANS_OF[request.param])
    monkeypatch.setattr(fused_linear, "_INTERPRETED_BLOCK_N", 0)  # several blocks of columns
    if request.param == "pieces of slices":
        monkeypatch.setattr(fused_linear, "_MOST_COLUMNS", 32)
    return triton_kernels


every_way = pytest.mark.parametrize(
    "way, rows", [(w, rows) for w in ROWS for rows in ROWS[w]], indirect=["way"]
)


class Inputs:
    """A layer's inputs, each with NaN around it, and what must come of them."""

    def __init__(self, rows, width, device, dtype, bias, norm=True, heads=(3, 1), dim=6, out=21):
        def weight(count):
            return guarded_rows(count, width, device, dtype, scale=width**-0.5)

        def bias_of(count):
            return guarded_rows(count, 1, device, dtype)[:, 0] if bias else None

        self.rows, self.heads, self.dim = rows, heads, dim
        self.x = guarded(rows, width, device=device, dtype=dtype)
        self.norm = guarded_rows(width, 1, device, dtype)[:, 0] if norm else None
        self.plain, self.plain_bias = weight(out), bias_of(out)
        self.pairs, self.pairs_bias = weight(2 * out), bias_of(2 * out)
        q_heads, kv_heads = heads
        self.qkv, self.qkv_bias = (make((q_heads + 2 * kv_heads) * dim) for make in (weight, bias_of))
        self.residual = guarded(rows, out, device=device, dtype=dtype)
        self.positions = torch.randint(5, 40, (rows,), device=device)
        table, self.angle = oracles.angles(41, dim)
        table[:5] = NAN
        self.table = table.to(device)
        self.slots = rows + 4
        self.loc = (torch.randperm(self.slots - 1)[:rows] + 1).to(device)
        self.pool = torch.full((2, 3, self.slots, kv_heads, dim), NAN, device=device, dtype=dtype)

    def normed(self):
        return self.x if self.norm is None else oracles.norm(self.x, self.norm, EPS)

    def store(self, kernels):
        """Queries, and the keys and values that landed in the pool of the layer in the middle."""
        k_cache, v_cache = self.pool[:, 1]
        q = kernels.norm_qkv_rotary_store(
            self.x, self.norm, EPS, self.qkv, self.qkv_bias, self.positions, self.table, k_cache, v_cache,
            self.loc,
        )  # fmt: skip
        return q, k_cache[self.loc], v_cache[self.loc]

    def store_oracle(self):
        q_heads, kv_heads = self.heads
        heads = oracles.product(self.normed(), self.qkv, self.qkv_bias).view(self.rows, -1, self.dim)
        q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
        return oracles.rotate(q, self.positions, self.angle), oracles.rotate(k, self.positions, self.angle), v


@every_way
@pytest.mark.parametrize("bias, residual", [(False, False), (True, True)])
def test_linear(way, device, dtype, tolerance, rows, bias, residual):
    given = Inputs(rows, 70, device, dtype, bias)
    expected = oracles.product(given.x, given.plain, given.plain_bias)
    if residual:
        expected += given.residual.double().cpu()
    before = given.residual.clone()
    y = way.linear(given.x, given.plain, given.plain_bias, given.residual if residual else None)
    assert y.dtype == dtype and y.is_contiguous() and torch.equal(given.residual, before)
    close(y, expected, tolerance)


@every_way
@pytest.mark.parametrize("bias", [False, True])
def test_norm_gate_up(way, device, dtype, tolerance, rows, bias):
    given = Inputs(rows, 70, device, dtype, bias)
    expected = oracles.gate(oracles.product(given.normed(), given.pairs, given.pairs_bias))
    y = way.norm_gate_up(given.x, given.norm, EPS, given.pairs, given.pairs_bias)
    assert y.dtype == dtype
    close(y, expected, tolerance)


@every_way
@pytest.mark.parametrize("bias, norm", [(True, True), (False, False)])
def test_norm_qkv_rotary_store(way, device, dtype, tolerance, rows, bias, norm):
    """Of two pools of NaN only the named slots of the layer in the middle are written."""
    given = Inputs(rows, 40, device, dtype, bias, norm, heads=(3, 2))
    for actual, expected in zip(given.store(way), given.store_oracle(), strict=True):
        assert actual.dtype == dtype and actual.shape == expected.shape
        close(actual, expected, tolerance)
    untouched = [slot for slot in range(given.slots) if slot not in given.loc.tolist()]
    assert given.pool[:, [0, 2]].isnan().all() and given.pool[:, 1, untouched].isnan().all()


@pytest.mark.parametrize("heads, dim, width", [((5, 1), 20, 24), ((2, 2), 16, 32)])
def test_shapes_of_heads(way, device, dtype, tolerance, heads, dim, width):
    given = Inputs(2, width, device, dtype, bias=True, heads=heads, dim=dim)
    for actual, expected in zip(given.store(way), given.store_oracle(), strict=True):
        close(actual, expected, tolerance)


@pytest.mark.parametrize(
    "way, rows",
    [("native", 3), ("whole rows", 3), ("slices", 11), ("tiles", 20), ("library", 3)],
    indirect=["way"],
)
def test_a_row_of_nan_stays_alone(way, device, rows):
    """A padding row holds anything and writes to slot 0; its neighbours are what they are without it."""
    given, results = Inputs(rows, 40, device, torch.float32, bias=True), []
    given.loc[1], given.positions[1] = 0, 5
    kept = [row for row in range(rows) if row != 1]
    for content in (1.0, NAN):
        given.x[1] = given.residual[1] = content
        q, k, v = given.store(way)
        y = way.linear(given.x, given.plain, given.plain_bias, given.residual)
        gated = way.norm_gate_up(given.x, given.norm, EPS, given.pairs, given.pairs_bias)
        results.append([t[kept].clone() for t in (q, k, v, y, gated)])
    for first, second in zip(*results, strict=True):
        assert first.isfinite().all() and torch.equal(first, second)


@pytest.mark.parametrize(
    "way, rows",
    [("whole rows", 1), ("whole rows", 3), ("slices", 11), ("tiles", 20), ("library", 3)],
    indirect=["way"],
)
def test_rows_that_are_not_there_are_not_written(way, device, rows, monkeypatch):
    """Every output gets a border of NaN, which is there afterwards."""
    given, borders, empty = Inputs(rows, 40, device, torch.float32, bias=False), [], torch.empty

    def bordered(*shape, **options):
        shape = shape[0] if isinstance(shape[0], (tuple, torch.Size)) else shape
        if len(shape) < 2:
            return empty(*shape, **options)
        outer = torch.full((shape[0] + 70, *shape[1:]), NAN, **options)
        borders.append((outer, shape[0]))
        return outer[: shape[0]]

    monkeypatch.setattr(torch, "empty", bordered)
    results = [*given.store(way), way.linear(given.x, given.plain, None, given.residual)]
    results.append(way.norm_gate_up(given.x, given.norm, EPS, given.pairs, None))
    assert not any(result.isnan().any() for result in results)
    assert all(outer[count:].isnan().all() for outer, count in borders)


def test_padded_rows_may_share_the_padding_slot(way, device):
    given = Inputs(5, 40, device, torch.float32, bias=False)
    given.loc[2:] = 0
    actual, expected = given.store(way), given.store_oracle()
    for part, wanted in zip(actual, expected, strict=True):
        close(part[:2], wanted[:2], 1e-5)


def test_no_rows(way, device):
    given = Inputs(1, 40, device, torch.float32, bias=True)
    none = given.loc[:0]
    given.x, given.positions, given.loc, given.residual = given.x[:0], none, none, given.residual[:0]
    q, _, _ = given.store(way)
    assert q.shape == (0, 3, 6) and given.pool.isnan().all()
    assert way.linear(given.x, given.plain, given.plain_bias, given.residual).shape == (0, 21)
    assert way.norm_gate_up(given.x, given.norm, EPS, given.pairs, given.pairs_bias).shape == (0, 21)


@pytest.mark.parametrize("rows", [1, 4, 200, 300])
def test_linear_float32_does_not_round(kernels, device, dtype, rows):
    """Sums of whole numbers beyond what bfloat16 holds come out exact."""
    x = torch.randint(0, 8, (rows, 64), device=device).to(dtype)
    weight = torch.randint(0, 8, (40, 64), device=device).to(dtype)
    y = kernels.linear_float32(x, weight)
    assert y.dtype == torch.float32 and y.max() > 512
    assert torch.equal(y.double().cpu(), oracles.product(x, weight))


# ---- which plan ----


def test_the_table_is_ascending_and_fits_its_kernels():
    bounds = [most for most, _ in fused_linear.PLANS]
    assert bounds == sorted(set(bounds))
    for most, plan in fused_linear.PLANS:
        assert plan.block_m & (plan.block_m - 1) == 0 and plan.block_n & (plan.block_n - 1) == 0
        if plan.way == "few_rows":
            assert most <= plan.block_m  # such a kernel has one block of rows
        else:
            assert min(plan.block_n, plan.block_k) >= 16 and plan.block_m >= 8  # what tl.dot takes


def test_the_row_count_picks_the_first_plan_that_reaches_so_far():
    previous = 0
    for most, plan in fused_linear.PLANS:
        for rows in {previous + 1, most}:
            assert fused_linear.plan_for(rows, torch.bfloat16) is plan
            exact = fused_linear.plan_for(rows, torch.float32)
            assert exact is (plan if plan.way == "few_rows" else None)
        previous = most
    assert fused_linear.plan_for(previous + 1, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_what_runs_is_what_the_table_says(dtype, monkeypatch):
    """Above the table's end, and only there, the library multiplies; no kernel is run here."""
    launched = []

    def launch(plan, mode, x, weight, bias, out, *more, **options):
        launched.append(plan)
        return out.zero_()

    monkeypatch.setattr(fused_linear, "_launch", launch)
    monkeypatch.setattr(fused_linear, "rms_norm", lambda x, weight, eps: x)
    monkeypatch.setattr(fused_linear, "silu_and_mul", lambda x: x[:, ::2])
    monkeypatch.setattr(fused_linear, "rotary_store", lambda qkv, *rest: qkv)
    most = max(bound for bound, _ in fused_linear.PLANS)
    for rows in (1, 2, 3, 8, 9, most, most + 1):
        given = Inputs(rows, 8, "cpu", dtype, bias=False)
        launched.clear()
        given.store(fused_linear)
        fused_linear.linear(given.x, given.plain, None, given.residual)
        fused_linear.norm_gate_up(given.x, given.norm, EPS, given.pairs, None)
        plan = fused_linear.plan_for(rows, dtype)
        assert launched == ([] if plan is None else [plan] * 3)
