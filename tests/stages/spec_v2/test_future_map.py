"""What one step leaves to the next, by rows of the request table."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from stages.spec_v2.kernels import load_kernels
from stages.spec_v2.layers.attention.torch_native_backend import TorchNativeAttnBackend
from stages.spec_v2.managers.forward_stream import ThreadForwardStream
from stages.spec_v2.managers.overlap_utils import DecodeStep, FutureMap
from stages.spec_v2.mem_cache.memory_pool import ReqToTokenPool
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped

from .lag import Lag

CPU = torch.device("cpu")


def index(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.fixture
def futures():
    stream = ThreadForwardStream()
    yield FutureMap(4, CPU, stream, needs_cpu_seq_lens=True)
    stream.synchronize()


def test_a_step_reads_what_its_requests_left_whatever_their_order(futures):
    futures.add_draft_state("topk_index", (2,), torch.int64)
    futures.publish(index(3, 1), index(30, 10))
    futures.stash(index(3, 1), index(33, 11), topk_index=index(5, 6, 7, 8).view(2, 2))
    pool = ReqToTokenPool(4, 40, CPU, load_kernels("native"))
    slots = index(71, 72, 73, 91, 92, 93, 1, 2, 3).view(3, 3)
    step = DecodeStep.resolve(
        futures, pool, index(1, 3, 0), index(4, 25, 0), index(12, 37, 0), slots, index(2, 3, 0)
    )
    entered = {(1, 12): 71, (1, 13): 72, (3, 37): 91, (3, 38): 92, (3, 39): 93}
    assert {
        tuple(place): int(pool.req_to_token[*place]) for place in pool.req_to_token.nonzero().tolist()
    } == entered
    assert step.seq_lens.tolist() == [10, 30, 0]
    assert step.output_tokens.tolist() == [11, 33, 0]
    assert step.output_positions[:2].tolist() == [7, 6], "S = prompt + output − 1"
    assert futures.draft_state["topk_index"][step.req_pool_indices].tolist() == [[7, 8], [5, 6], [0, 0]]


def test_lengths_are_waited_for_and_no_more_than_that(futures):
    """The host goes on at the end of the verification, with the draft extend still to come."""
    begin, end = threading.Event(), threading.Event()
    on_publish = futures.next_publish()

    def step():
        begin.wait()
        futures.publish(index(2), index(17))
        on_publish()
        end.wait()
        futures.stash(index(2), index(5))

    job = futures.forward_stream.submit(step)
    assert not futures.publish_ready.is_set()
    begin.set()
    assert futures.resolve_seq_lens_cpu(np.array([2, 0])).tolist() == [17, 0]
    assert not job.done()
    end.set()


def test_where_no_backend_plans_nothing_is_waited_for():
    futures = FutureMap(4, CPU, ThreadForwardStream(), needs_cpu_seq_lens=False)
    before = futures.publish_ready
    futures.next_publish()()
    assert futures.publish_ready is before, "no event is made that nobody waits for"
    assert futures.resolve_seq_lens_cpu(np.array([1])) is None


@pytest.mark.parametrize("tree", [None, (3, 2, 8)], ids=tree_id)
def test_padding_rows_never_get_a_length_or_a_slot(engines, zoo, tree):
    """They publish and stash what they like into row 0, and stand at 0 in every step."""
    engine = engines.get(tree=tree, cuda_graph_bs=[8])
    run(engine, zoo.prompts((5, 9, 7), 12), {"max_new_tokens": 12})
    futures = engine.scheduler.future_map
    assert int(futures.new_seq_lens_buf[0]) == 0
    assert not engine.scheduler.req_to_token_pool.req_to_token[0].any()
    assert all(int(state.max()) < zoo.ref().vocab for state in futures.draft_state.values())


@pytest.mark.parametrize("tree", [None, (3, 1, 4), (3, 2, 8)], ids=tree_id)
@pytest.mark.parametrize("seed", range(2))
def test_a_backend_that_plans_gets_the_lengths_of_the_device(engines, zoo, tree, seed, monkeypatch):
    """With a step in flight and a late stream: what is planned for on the host is what the device has."""
    monkeypatch.setattr(TorchNativeAttnBackend, "needs_cpu_seq_lens", True)
    prompts, seen = zoo.prompts((5, 9, 7), 16), []
    with engines.fresh(tree=tree, disable_cuda_graph=True) as engine:
        runner = Probe(engine).target_runner

        def see(args, kwargs, result):
            batch = args[0]
            if not batch.forward_mode.is_extend():
                seen.append((batch.seq_lens_cpu.tolist(), (batch.prefix_lens + batch.max_q_len).tolist()))

        with Lag(engine, seed).open(), Probe(engine).spy(runner, "forward", see):
            done = run(engine, prompts, check=False)
    assert done.tokens == [zoo.r0(p) for p in prompts]
    assert len(seen) > 3 and all(planned == real for planned, real in seen)


def test_a_plan_from_the_step_before_would_be_noticed(engines, zoo, monkeypatch):
    """The same, with nobody waiting for the publication: the lengths are not those of the device."""
    monkeypatch.setattr(TorchNativeAttnBackend, "needs_cpu_seq_lens", True)
    prompts, wrong = zoo.prompts((5, 9, 7), 16), []
    with engines.fresh(tree=(3, 1, 4), disable_cuda_graph=True) as engine:
        futures, runner = engine.scheduler.future_map, Probe(engine).target_runner

        def see(args, kwargs, result):
            batch = args[0]
            if not batch.forward_mode.is_extend():
                wrong.append(batch.seq_lens_cpu.tolist() != (batch.prefix_lens + batch.max_q_len).tolist())

        def hasty(rows):
            return futures._seq_lens_host.numpy()[rows]

        with Lag(engine, 0, share=1.0).open(), Probe(engine).spy(runner, "forward", see):
            with swapped(futures, "resolve_seq_lens_cpu", hasty):
                run(engine, prompts, check=False)
    assert any(wrong)
