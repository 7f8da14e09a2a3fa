"""The forward stream of a CPU: one job after the other, in a thread, with events that can be waited for."""

from __future__ import annotations

import threading

import pytest
import torch

from stages.spec_v2.managers.forward_stream import ForwardStream, ThreadForwardStream, make_forward_stream


@pytest.fixture
def stream():
    made = ThreadForwardStream()
    yield made
    made.synchronize()


def test_jobs_run_one_after_the_other_beside_their_caller(stream):
    gate, done = threading.Event(), []
    first = stream.submit(lambda: (gate.wait(), done.append(1)))
    second = stream.submit(done.append, 2)
    assert done == [] and not first.done() and not second.done()
    gate.set()
    stream.wait_for_reads()
    assert done == [1, 2]


def test_a_job_is_in_inference_mode_and_elsewhere(stream):
    inside = stream.submit(lambda: (torch.is_inference_mode_enabled(), threading.current_thread())).result()
    assert inside[0] and inside[1] is not threading.current_thread()


def test_the_barrier_waits_for_all_that_was_submitted(stream):
    """And not only for the first: a thread that waits is let go when both have run."""
    gates, passed = [threading.Event(), threading.Event()], threading.Event()
    for gate in gates:
        stream.submit(gate.wait)

    def wait():
        stream.wait_for_reads()
        passed.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    gates[0].set()
    assert not passed.is_set()
    gates[1].set()
    waiter.join()


def test_a_failure_is_told_by_its_result_and_by_those_behind_it(stream):
    def fail():
        raise ValueError("no")

    failed, behind = stream.submit(fail), stream.submit(int)
    for future in (failed, behind):
        with pytest.raises(ValueError, match="no"):
            future.result()
    stream.synchronize()
    assert stream.submit(int).result() == 0, "what failed is over once everything is done"


def test_nobody_waits_for_an_event_that_a_failure_left_out(stream):
    gate, event = threading.Event(), stream.event()

    def fail():
        gate.wait()
        raise ValueError("no")

    future = stream.submit(fail)
    gate.set()
    event.synchronize()
    with pytest.raises(ValueError, match="no"):
        future.result()


def test_an_event_is_recorded_inside_its_job(stream):
    gate, event = threading.Event(), stream.event()
    future = stream.submit(lambda: (event.record(), gate.wait()))
    event.synchronize()
    assert not future.done()
    gate.set()


def test_without_overlap_a_job_runs_when_it_is_submitted():
    stream = make_forward_stream(torch.device("cpu"), overlaps=False)
    assert type(stream) is ForwardStream
    done = []
    stream.submit(done.append, 1)
    assert done == [1]
    stream.event().synchronize()
    assert type(make_forward_stream(torch.device("cpu"), overlaps=True)) is ThreadForwardStream
