"""Where forwards run, beside the scheduler: a stream of its own on a GPU, a thread of its own on a CPU.

Upstream has `forward_stream` beside the schedule stream in sglang/srt/managers/scheduler.py. Three kinds do
the same, so that the scheduler need not know which it has:

    ForwardStream       runs a job at once: without overlap
    CudaForwardStream   a job only launches kernels, on a stream of its own; the host goes on
    ThreadForwardStream a CPU has no streams, so one thread takes one job after the other

Jobs run in the order in which they were submitted, and see all that the scheduler has written by then. Before
the scheduler overwrites what a job may still read, it calls `wait_for_reads`: its stream then waits for
theirs, or in the thread's case the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch


class Event:
    """A point that a job comes to: it calls `record`, and whoever calls `synchronize` waits for that."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class ForwardStream:
    """Jobs run when they are submitted, so there is nothing to wait for."""

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        """Queue job(*args); `result()` of what is returned gives what it gave, or raises what it raised.

        On a GPU that is there once all is launched: what its tensors hold is still to come.
        """
        done: Future = Future()
        done.set_result(job(*args))
        return done

    def event(self) -> Event | torch.cuda.Event:
        """A new event for the next job."""
        return Event()

    def wait_for_reads(self) -> None:
        """The write-after-read barrier: what the scheduler writes from now on, no job so far touches."""

    def synchronize(self) -> None:
        """Wait until everything is done. What jobs raised, their `result()` told; here it is forgotten."""

    def close(self) -> None:
        """The same for the last time."""
        self.synchronize()


class CudaForwardStream(ForwardStream):
    """Kernels are launched on a stream of their own.

    What a job allocates, only jobs use: memory that goes back to the allocator while a kernel still reads it
    is given out again on the same stream, behind that kernel.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        # Made once, since to make them takes longer than to use them.
        self._is_current = torch.cuda.stream(self.stream)
        self._written = torch.cuda.Event()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        self._written.record()
        self.stream.wait_event(self._written)
        with self._is_current:
            return super().submit(job, *args)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def wait_for_reads(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


class ThreadForwardStream(ForwardStream):
    """One thread, one job after the other. Jobs behind one that failed fail with it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="forward-stream")
        self._last: Future | None = None
        self._error: BaseException | None = None
        self._events: list[ThreadEvent] = []

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        self._last = self._executor.submit(self._run, job, *args)
        return self._last

    def _run(self, job: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._error is not None:
                raise self._error
            with torch.inference_mode():  # which holds for one thread
                return job(*args)
        except BaseException as error:
            self._error = error
            for event in self._events:  # nobody may wait for what will not come
                event.record()
            raise

    def event(self) -> ThreadEvent:
        self._events = [event for event in self._events if not event.is_set()]
        self._events.append(ThreadEvent())
        return self._events[-1]

    def wait_for_reads(self) -> None:
        if self._last is not None:
            wait([self._last])

    def synchronize(self) -> None:
        self.wait_for_reads()
        self._last = self._error = None

    def close(self) -> None:
        self.synchronize()
        self._executor.shutdown()


class ThreadEvent(threading.Event):
    def record(self) -> None:
        self.set()

    def synchronize(self) -> None:
        self.wait()


def make_forward_stream(device: torch.device, overlaps: bool) -> ForwardStream:
    if not overlaps:
        return ForwardStream()
    return CudaForwardStream(device) if device.type == "cuda" else ThreadForwardStream()
