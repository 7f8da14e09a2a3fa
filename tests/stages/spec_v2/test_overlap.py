"""The loop that works one step behind: its order, what it waits for, and what a late result may change."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.spec_v2.managers.schedule_batch import Req
from stages.spec_v2.model_executor import device_io
from stages.spec_v2.model_executor.packed_buffer import PackedBuffer
from stages.spec_v2.sampling.sampling_params import SamplingParams
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped

from .lag import Lag, rush

SHAPES = [None, (3, 1, 4), (3, 2, 8)]
STAGE = str(Path(sys.modules[Req.__module__].__file__).parents[1])


def watched(engine, events):
    """Launches and processed results as ("launch", n) and ("process", n), n counting launches."""
    scheduler, numbers = engine.scheduler, {}
    real_run, real_process = scheduler.run_batch, scheduler.process_batch_result

    def run_batch(batch):
        events.append(("launch", len(numbers)))
        result = real_run(batch)
        numbers[id(result)] = (len(numbers), result)  # kept, so that no id is used twice
        return result

    def process(batch, result):
        events.append(("process", sum(name == "process" for name, _ in events)))
        return real_process(batch, result)

    return swapped(scheduler, "run_batch", run_batch), swapped(scheduler, "process_batch_result", process)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("overlaps", [True, False])
def test_the_order_of_launches_and_results(engines, zoo, tree, overlaps):
    events, engine = [], engines.get(tree=tree, disable_overlap_schedule=not overlaps)
    launches, results = watched(engine, events)
    with launches, results:
        run(engine, zoo.prompts((5, 9), 12), {"max_new_tokens": 12})
    count = sum(name == "launch" for name, _ in events)
    if overlaps:  # launch(t + 1) stands before process(t); the last launch is found to be one too many
        want = [("launch", 0)]
        for step in range(1, count):
            want += [("launch", step), ("process", step - 1)]
    else:
        want = [event for step in range(count) for event in (("launch", step), ("process", step))]
    assert events == want and count > 4


@pytest.mark.parametrize("loop", ["event_loop_normal", "event_loop_overlap"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_either_loop_drives_either_stream(engines, zoo, loop, overlaps):
    """The loops decide when a result is processed, the stream when a job runs: every pair gives the same."""
    engine, prompts = (
        engines.get(tree=(3, 2, 8), disable_overlap_schedule=not overlaps),
        zoo.prompts((5, 9), 16),
    )
    scheduler = engine.scheduler
    reqs = [
        Req(f"r{i}", prompt, SamplingParams(temperature=0, max_new_tokens=16), 1, frozenset(), 256)
        for i, prompt in enumerate(prompts)
    ]
    for req in reqs:
        scheduler.add_request(req)
    getattr(scheduler, loop)()
    assert [req.output_ids for req in reqs] == [zoo.r0(p) for p in prompts]
    assert not scheduler.result_queue
    Probe(engine).check_idle()


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_same_tokens_and_rounds_with_and_without(engines, zoo, tree):
    prompts = zoo.prompts((5, 9, 7, 12, 3), 24)
    params = [
        {"max_new_tokens": 24},
        {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 9},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "max_new_tokens": 20},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01, "sampling_seed": 11, "repetition_penalty": 1.3},
        {"logit_bias": {"7": 4.0}, "min_new_tokens": 3, "max_new_tokens": 14},
    ]
    runs = []
    for overlaps in (True, False):
        engine = engines.get(tree=tree, disable_overlap_schedule=not overlaps, chunked_prefill_size=8)
        runs.append(run(engine, prompts, params, return_logprob=True, logprob_start_len=0))
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
    for one, other in zip(*(r.results for r in runs), strict=True):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            scores = [[score[0] or 0.0 for score in r["meta_info"][name]] for r in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}], ids=["graph", "eager"])
def test_in_steady_state_the_host_waits_for_the_last_result_alone(engines, zoo, tree, flags, monkeypatch):
    """One read a step, of the step before; no barrier, no length, no other tensor that becomes a number."""
    engine, waits, reads = engines.get(tree=tree, **flags), [], []
    scheduler, main = engine.scheduler, threading.current_thread()
    stream = scheduler.forward_stream

    def spy(owner, name, note):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if threading.current_thread() is main:
                waits.append(note)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    run(engine, zoo.prompts((5, 9, 7), 24), {"max_new_tokens": 6})  # sizes are prepared
    assert engine.flush_cache()  # and the round that came too late is forgotten
    spy(stream, "wait_for_reads", "barrier")
    spy(device_io.Readback, "wait", "read")
    spy(threading.Event, "wait", "event")
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        real = getattr(torch.Tensor, name)

        def seen(self, *args, _real=real, _name=name, **kwargs):
            if threading.current_thread() is main and STAGE in sys._getframe(1).f_code.co_filename:
                reads.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, seen)
    per_step = []

    def before(probe):
        waits.clear()

    def after(probe):
        per_step.append(list(waits))

    before_counts = dict(device_io.counts)
    run(engine, zoo.prompts((5, 9, 7), 24), {"max_new_tokens": 24}, check=False, before=before, after=after)
    assert per_step[0] == ["barrier"], "a prefill takes rows that a step in flight may have had"
    assert len(per_step) > 6 and all(step == ["read"] for step in per_step[2:])
    assert reads == []
    counted = {name: device_io.counts[name] - before_counts[name] for name in before_counts}
    assert counted["downloads"] == len(per_step) - 1
    assert counted["uploads"] <= 2 * len(per_step)


def test_the_last_result_is_read_while_the_next_step_runs(engines, zoo):
    """With the step in flight held until somebody waits for it, the step before is processed all the same."""
    engine, order = engines.get(tree=(3, 2, 8)), []
    scheduler = engine.scheduler
    real = scheduler.process_batch_result

    def process(batch, result):
        in_flight = scheduler.result_queue[-1][1] if scheduler.result_queue else None
        order.append(in_flight is not None and not in_flight.done())
        return real(batch, result)

    prompts = zoo.prompts((5, 9, 7), 24)
    with Lag(engine, 0, share=1.0).open(), swapped(scheduler, "process_batch_result", process):
        done = run(engine, prompts, {"max_new_tokens": 24}, check=False)
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    assert sum(order) > len(order) // 2, "results are taken in beside a step that has not ended"


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("scored", [False, True])
def test_a_result_outlives_the_step_behind_it(engines, zoo, tree, scored):
    """The next step has run to its end before the last one's result is read: it is still that result."""
    engine, prompts = engines.get(tree=tree), zoo.prompts((5, 9, 7), 16)
    with rush(engine):
        done = run(engine, prompts, check=False, return_logprob=scored)
    assert done.tokens == [zoo.r0(p) for p in prompts]


def test_the_inputs_of_a_step_outlive_the_launch_behind_it():
    """A GPU may read pinned memory when the next step's inputs have long been written."""
    buffer = PackedBuffer(torch.device("cpu"), [(2,), (2,)])
    buffer.send(np.array([1, 2]), np.array([3]))
    first = buffer.host
    buffer.send(np.array([5]), np.array([6, 7]))
    assert [part.tolist() for part in first] == [[1, 2], [3, 0]]
    assert [part.tolist() for part in buffer.host] == [[5, 0], [6, 7]]
    assert [part.tolist() for part in buffer.device] == [[5, 0], [6, 7]]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_late_result_changes_nothing(engines, zoo, tree):
    """A request ends by a stop token while its next round is under way: nothing of that round shows."""
    prompt = zoo.prompts((9,), 24)[0]
    truth = zoo.r0(prompt, max_new_tokens=12)
    stop = next(t for i, t in enumerate(truth) if i >= 3 and truth.index(t) == i)
    engine = engines.get(tree=tree)
    params = {"max_new_tokens": 12, "stop_token_ids": [stop]}
    done = run(engine, [prompt], params, return_logprob=True, return_hidden_states=True)
    out, meta = done.tokens[0], done.results[0]["meta_info"]
    assert out == truth[: truth.index(stop) + 1]
    assert len(meta["hidden_states"]) == len(meta["output_token_logprobs"]) == len(out)
    assert engine.scheduler.result_queue, "its last round has not been looked at"
    cached = Probe(engine).tree.evictable_size()
    assert cached == len(prompt) + len(out) - 1
    follow = run(engine, [[*prompt, *out, 50]], {"max_new_tokens": 3})
    assert follow.results[0]["meta_info"]["cached_tokens"] == cached
    rounds = meta.get("spec_verify_ct")
    again = engines.get(tree=tree, disable_overlap_schedule=True)
    assert run(again, [prompt], params).results[0]["meta_info"].get("spec_verify_ct") == rounds


def test_a_result_of_an_earlier_stay_is_too_late(engines, zoo):
    """A request is pushed back while a round of it is under way, and comes back before that is processed."""
    engine, prompts = engines.get(tree=(3, 1, 4)), zoo.prompts((9, 12), 24)
    scheduler = engine.scheduler
    steps, real = [], scheduler.update_running_batch

    def update():
        steps.append(None)
        if len(steps) == 4:  # a round of both is under way
            victim = scheduler.running_batch.reqs[1]
            scheduler.running_batch.filter_batch([0])
            scheduler.tree_cache.cache_finished_req(victim)
            victim.reset_for_retract()
            scheduler.waiting_queue.insert(0, victim)
            return scheduler.get_new_batch_prefill()  # in the same breath
        return real()

    with swapped(scheduler, "update_running_batch", update):
        done = run(engine, prompts, {"max_new_tokens": 24}, check=False)
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    rounds = [r["meta_info"]["spec_verify_ct"] for r in done.results]
    alone = engines.get(tree=(3, 1, 4), disable_overlap_schedule=True)
    assert rounds == [
        r["meta_info"]["spec_verify_ct"] for r in run(alone, prompts, {"max_new_tokens": 24}).results
    ]


def test_no_thread_outlives_its_engine(engines, zoo):
    engine = engines.fresh(tree=(3, 1, 4))
    prompt, before = zoo.prompts((9,), 24)[0], threading.active_count()
    next(engine.generate(input_ids=prompt, sampling_params={"temperature": 0}, stream=True))
    assert threading.active_count() == before + 1
    engine.shutdown()
    assert threading.active_count() == before


def test_an_error_in_a_step_ends_its_requests_and_nothing_else(engines, zoo):
    engine, prompt = engines.get(tree=(3, 1, 4)), zoo.prompts((9,), 24)[0]
    worker = engine.scheduler.draft_worker
    calls, real = [], worker.verify

    def verify(*args):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return real(*args)

    with swapped(worker, "verify", verify), pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 24})
    Probe(engine).check_idle()
    assert run(engine, [prompt], {"max_new_tokens": 24}).tokens == [zoo.r0(prompt, max_new_tokens=24)]
