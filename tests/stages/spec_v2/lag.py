"""Makes a forward stream of a CPU as late as it can be, at places that a seed chooses, and frees memory the
hard way. A job that is held goes on when the scheduler waits for it, or for an event that it will record: so
everything that the scheduler does without waiting is done before. No test sleeps.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

from tests.contract.probe import Probe, swapped


class Lag:
    """Holds the jobs of one engine's forward stream."""

    def __init__(self, engine, seed: int, share: float = 0.5):
        self.scheduler = engine.scheduler
        self.stream = self.scheduler.forward_stream
        self.share, self.rng = share, random.Random(seed)
        self.holds = 0
        self._waits, self._over = 0, False
        self._changed = threading.Condition()

    def hold(self) -> None:
        """In a job: wait for somebody to wait, or go on at once."""
        if self.rng.random() < self.share:
            with self._changed:
                self.holds += 1
                self._changed.wait_for(lambda: self._waits > 0 or self._over)

    def let_go(self) -> None:
        """Nobody is held any more, whatever broke off and whoever forgets to wait."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def waiting(self, real):
        """`real` as a call in which the caller waits for a job."""

        def call(*args, **kwargs):
            with self._changed:
                self._waits += 1
                self._changed.notify_all()
            try:
                return real(*args, **kwargs)
            finally:
                with self._changed:
                    self._waits -= 1

        return call

    @contextlib.contextmanager
    def open(self) -> Iterator[Lag]:
        real_submit, real_event = self.stream.submit, self.stream.event

        def submit(job, *args):
            def held(*args):
                self.hold()
                return job(*args)

            future = real_submit(held, *args)
            future.result = self.waiting(future.result)
            return future

        def event():
            made = real_event()
            made.synchronize = self.waiting(made.synchronize)
            return made

        def before(real):
            def call(*args, **kwargs):
                if threading.current_thread() is not threading.main_thread():
                    self.hold()
                return real(*args, **kwargs)

            return call

        futures = self.scheduler.future_map
        with contextlib.ExitStack() as stack:
            stack.callback(self.stream.synchronize)  # first in, last out: nobody is left behind
            for name in ("wait_for_reads", "synchronize"):
                stack.enter_context(swapped(self.stream, name, self.waiting(getattr(self.stream, name))))
            stack.enter_context(swapped(self.stream, "submit", submit))
            stack.enter_context(swapped(self.stream, "event", event))
            stack.enter_context(swapped(futures, "stash", before(futures.stash)))
            for runner in self.scheduler.model_runners:
                stack.enter_context(swapped(runner, "forward", before(runner.forward)))
            stack.callback(self.let_go)
            yield self
            self.stream.synchronize()  # while somebody who waits is still noticed


@contextlib.contextmanager
def rush(engine) -> Iterator[None]:
    """The other extreme: a job has run before `submit` returns. So a step is over before the last one's
    result is looked at.
    """
    stream = engine.scheduler.forward_stream
    real = stream.submit

    def submit(job, *args):
        future = real(job, *args)
        future.exception()
        return future

    with swapped(stream, "submit", submit):
        yield


@contextlib.contextmanager
def poison_on_free(engine) -> Iterator[list[int]]:
    """Overwrite every page as soon as it is freed with NaN, as the next job of the stream.

    On a GPU nothing reaches freed memory earlier: whoever gets it writes in a later step. Yields a list of
    how many slots went each time.
    """
    probe, counts = Probe(engine), []
    allocator, real = probe.allocator, probe.allocator.free

    def spoil(index):
        for runner in probe.runners():
            runner.token_to_kv_pool.k_buffer[:, index] = float("nan")
            runner.token_to_kv_pool.v_buffer[:, index] = float("nan")

    def free(slots):
        real(slots)
        if len(slots):
            pages = np.unique(slots // allocator.page_size)
            index = torch.from_numpy(probe._slots_of(pages))
            engine.scheduler.forward_stream.submit(spoil, index)
            counts.append(len(slots))

    with swapped(allocator, "free", free):
        yield counts
