"""Timing cases restated as counts: forwards, transfers, slots, sorts. A count does not depend
on the machine.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped

SHAPES = [(1, 1, 2), (3, 1, 4), (3, 2, 8), (5, 4, 16)]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("mind", [drafters.perfect, drafters.never])
def test_forwards_of_a_round(stage, engines, zoo, tree, mind):
    """steps − 1 draft forwards, one verification, one draft extend, whatever is accepted."""
    engine, prompts = engines.get(tree=tree), zoo.prompts((5, 9), 20)
    probe = Probe(engine)
    target, draft = [], []
    with (
        probe.spy(probe.target_runner, "forward", lambda a, k, r: target.append(a[0].forward_mode.name)),
        probe.spy(probe.draft_runner, "forward", lambda a, k, r: draft.append(a[0].forward_mode.name)),
        mind(probe, zoo.ref()),
    ):
        done = run(engine, prompts, {"max_new_tokens": 20})
    rounds = max(len(r) for r in done.rounds) + probe.overlaps  # one more, launched before the end was seen
    assert target == ["EXTEND"] + ["TARGET_VERIFY"] * rounds
    assert draft == ["EXTEND"] + (["DECODE"] * (tree[0] - 1) + ["DRAFT_EXTEND"]) * rounds
    if mind is drafters.never:
        assert rounds == 19 + probe.overlaps
    elif tree[1] == 1:
        assert rounds == -(-19 // (tree[0] + 1)) + probe.overlaps


@pytest.mark.parametrize("tree", [None, *SHAPES], ids=tree_id)
def test_transfers_of_a_step(stage, engines, zoo, tree):
    """One packed read and one packed upload in every step, prefill or round."""
    counts = stage.module("model_executor.device_io").counts
    engine, prompts = engines.get(tree=tree), zoo.prompts((5, 9, 7), 20)
    probe = Probe(engine)
    seen, rows = [], []

    def before(probe):
        seen.append(dict(counts))
        rows.append(len(probe.running()))

    def after(probe):
        start = seen.pop()
        seen.append({name: counts[name] - start[name] for name in counts})

    run(engine, prompts, {"max_new_tokens": 20}, before=before, after=after)
    work = [step for step in seen if any(step.values())]
    if stage.has("overlap"):  # slots are reserved apart from the step that will use them
        assert [step["downloads"] for step in work] == [
            int(i > 0 or not probe.overlaps) for i in range(len(work))
        ]
        assert {step["uploads"] for step in work} <= {1, 2} and work[0]["uploads"] == 2
        return
    assert {step["downloads"] for step in work} == {1}
    # Where a request has left, the index of the rows that stay is one upload more.
    left = [False, False, *(a != b for a, b in zip(rows[1:], rows[2:], strict=False))]
    assert [step["uploads"] for step in work] == [1 + gone * (tree is not None) for gone in left[: len(work)]]


@pytest.mark.needs("spec_scheduler")
def test_nothing_is_read_between_the_phases(stage, engines, zoo, monkeypatch):
    """No tensor becomes a Python number or a numpy array between the launches of draft, verify and draft
    extend.
    """
    engine, prompts = engines.get(tree=stage.shape), zoo.prompts((5, 9), 12)
    run(engine, prompts, {"max_new_tokens": 12}, check=False)  # a graph's size is prepared when first needed
    worker, reads, inside = Probe(engine).draft_worker, [], []
    reference_kernels = {"kernels", "torch_native_backend.py"}
    for name in (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "nonzero",
    ):
        real = getattr(torch.Tensor, name)

        def watched(self, *args, _real=real, _name=name, **kwargs):
            caller = sys._getframe(1).f_code.co_filename
            # The PyTorch twins of the kernels are for a CPU, where a read waits for nothing.
            if inside and str(stage.path) in caller and not reference_kernels & set(Path(caller).parts):
                reads.append((_name, caller))
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, watched)
    first, last = worker.draft, worker.forward_draft_extend_after_decode

    def enter(*args, **kwargs):
        inside.append(True)
        return first(*args, **kwargs)

    def leave(*args, **kwargs):
        result = last(*args, **kwargs)
        rounds.append(inside.pop())
        return result

    rounds: list[bool] = []
    with swapped(worker, "draft", enter), swapped(worker, "forward_draft_extend_after_decode", leave):
        run(engine, prompts, {"max_new_tokens": 12}, check=False)
    assert len(rounds) > 3 and reads == []


@pytest.mark.needs("tree")  # a chain is drafted into the slots that it is verified in
@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_draft_slots_reserved_are_draft_slots_written(stage, engines, zoo, tree):
    """(steps − 1) · topk slots, not steps · topk: the first level needs no forward."""
    engine, prompts = engines.get(tree=tree), zoo.prompts((5, 9), 12)
    probe, reserved, written = Probe(engine), [], []

    def drafted(args, kwargs, result):
        if stage.has("overlap"):  # they are looked up in the table, in front of those to verify in
            width = probe.draft_worker.draft_worker.draft_slots_per_req()
            assert width <= probe.scheduler.alloc_len_per_decode
            reserved.append(width * len(result.step.seq_lens))
        else:
            reserved.append(result.step.draft_slots.numel())

    def forwarded(args, kwargs, result):
        if args[0].forward_mode.is_decode():
            written.append(args[0].out_cache_loc.numel())

    with probe.spy(probe.draft_worker, "draft", drafted), probe.spy(probe.draft_runner, "forward", forwarded):
        run(engine, prompts, {"max_new_tokens": 12})
    assert sum(reserved) == sum(written) and (tree[0] == 1) == (sum(written) == 0)


@pytest.mark.needs("spec_scheduler", "page_tree")
@pytest.mark.parametrize("page", [1, 4])
def test_nothing_stays_reserved_between_steps(stage, engines, zoo, page):
    """Between steps a request holds the slots of its KV and the rest of its last page, nothing for later.

    Where a step is in flight, it holds what that one and the next may write, and nothing for later than that.
    """
    engine = engines.get(tree=(5, 4, 16), page_size=page, disable_radix_cache=True)
    worst, ahead = [], 2 * 16 if stage.has("overlap") else 0

    def after(probe):
        used, held = probe.allocator.size - probe.allocator.available_size(), probe.holders()
        worst.append(used - sum(req.kv_len for req in held) - (page - 1 + ahead) * len(held))

    run(engine, zoo.prompts((5, 9, 3), 24), {"max_new_tokens": 24}, after=after)
    assert max(worst) <= 0


@pytest.mark.parametrize("tree", [None, (3, 2, 8)], ids=tree_id)
def test_no_sort_of_the_vocabulary_unless_somebody_asks(stage, engines, zoo, tree, monkeypatch):
    sorted_widths: list[int] = []
    real = torch.sort

    def watched(tensor, *args, **kwargs):
        sorted_widths.append(tensor.shape[-1])
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch, "sort", watched)
    engine, prompts = engines.get(tree=tree), zoo.prompts((5, 9), 12)
    run(engine, prompts, {"temperature": 1.0}, check=False)
    assert models.BASE.vocab not in sorted_widths
    run(engine, prompts, [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], check=False)
    assert models.BASE.vocab in sorted_widths


def test_plain_decoding_pays_nothing_for_speculation(stage, engines, zoo):
    """No draft worker, one forward of one row per request and step, one slot per request and step."""
    engine, prompts = engines.get(), zoo.prompts((5, 9), 12)
    probe, rows, modes = Probe(engine), [], []
    assert probe.draft_worker is None
    with probe.spy(
        probe.target_runner,
        "forward",
        lambda a, k, r: (rows.append(len(a[0].input_ids)), modes.append(a[0].forward_mode.name)),
    ):
        run(engine, prompts, {"max_new_tokens": 12})
    steps = 11 + probe.overlaps  # one more was launched before the end was seen
    assert modes == ["EXTEND"] + ["DECODE"] * steps and rows == [14] + [2] * steps


@pytest.mark.needs("spec_scheduler", "tree")
def test_identical_rounds_cost_the_same(stage, engines, zoo):
    """Five equal batches with topk 4 and 32 draft tokens: equal counts each time, pool full, no tensor left
    behind.
    """
    engine, prompts = engines.get(tree=(3, 4, 32)), zoo.prompts((5, 9, 7, 12), 16) * 4
    probe, forwards, living = Probe(engine), [], []
    for _ in range(5):
        assert engine.flush_cache()
        count: list[int] = []
        with probe.spy(
            probe.target_runner, "forward", lambda a, k, r, count=count: count.append(len(a[0].input_ids))
        ):
            done = run(engine, prompts, {"max_new_tokens": 16}, check=False)
        assert done.tokens == [zoo.r0(p) for p in prompts]
        forwards.append(count)
        del done
        gc.collect()
        living.append(sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor))
    assert all(count == forwards[0] for count in forwards)
    assert living[-1] <= living[1] + 8, f"tensors pile up: {living}"


@pytest.mark.needs("spec_scheduler")
def test_twenty_identical_runs(stage, engines, zoo):
    """The same prompt again and again: counts stay, the tree does not grow."""
    prompt = zoo.prompts((9,), 16)[0]
    engine = engines.get(tree=(3, 1, 4))
    probe, steps, cached = Probe(engine), [], []
    for _ in range(20):
        done = run(engine, [prompt], check=False)
        steps.append(done.commits[0])
        cached.append(probe.tree.evictable_size())
    assert all(s == steps[0] for s in steps) and len(set(cached)) == 1


@pytest.mark.needs("spec_scheduler", "tree")
def test_accepted_tokens_move_without_a_kernel_per_size(stage, engines, zoo):
    """Every accept count at every batch size uses tensors of one shape, so nothing could compile anew."""
    engine = engines.get(tree=(4, 2, 10), page_size=4)
    probe, shapes = Probe(engine), {}
    pool = probe.target_runner.token_to_kv_pool

    def moved(args, kwargs, result):
        shapes.setdefault(batch_now[0], set()).add(tuple(args[0].shape))

    batch_now = [0]

    def before(probe):
        batch_now[0] = len(probe.running())

    with probe.spy(pool, "move_kv_cache", moved), drafters.scripted(probe, zoo.ref(), [0, 4, 1, 3, 2]):
        run(engine, zoo.prompts((5, 9, 3), 30), [{"max_new_tokens": n} for n in (8, 16, 30)], before=before)
    assert shapes and all(len(kinds) == 1 for kinds in shapes.values())
