"""Records an engine that launches a step and processes its result later, perhaps behind the next launch.

A step is known by its place in two queues: launches, jobs on the forward stream and results come in the same
order. On a CPU the forward stream is a thread: what a phase notes belongs to the job that runs, whatever the
scheduler launches meanwhile, and only that thread touches it.

Time is told by results: a step begins where the result before it was in, or with its launch if that was
later, and ends where its own is in. So the steps of a trace do not overlap, though their work does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .measure import Around, Spots
from .trace_record import Recorded, Recorder, slots_from


class LaunchRecorder(Recorder):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.jobs: deque[Recorded] = deque()  # launched, and not begun
        self.launched: deque[Recorded] = deque()  # and not processed
        self.host_at = self.processed_at = 0.0  # where launch or process ended, and where process did

    def wraps(self) -> Iterator[tuple[Spots, Around]]:
        scheduler = self.scheduler
        yield {"job": [(scheduler.model_worker, "forward_batch_generation")]}, self._job
        yield {"launch": [(scheduler, "run_batch")]}, self._launch
        taken_in = ("process_batch_result_prefill", "process_batch_result_decode")
        yield {"process": [(scheduler, name) for name in taken_in]}, self._process
        yield {"step": [(scheduler, "step")]}, self._step

    def _step(self, _: str, method: Callable[..., Any]) -> Any:
        self.host_at = self._now()
        return method()

    def _launch(self, _: str, method: Callable[..., Any], batch: Any) -> Any:
        """From the choice of the batch, which begins a step of the scheduler, to the end of the launch."""
        is_extend = batch.forward_mode.is_extend()
        kind = "prefill" if is_extend else "verify" if self.is_speculative else "decode"
        found = Recorded({"kind": kind, "start_us": self.host_at, "phases": []})
        if self.has_trees and not is_extend:
            found.columns["reserved"] = [req.kv_allocated_len for req in batch.reqs]
        self.jobs.append(found)
        self.launched.append(found)
        result = method(batch)
        begin, self.host_at = self.host_at, self._now()
        self._add(found, "launch", begin, self.host_at)
        return result

    def _job(self, _: str, method: Callable[..., Any], *args: Any) -> Any:
        """On the forward stream, and on a CPU on its thread."""
        found = self.current = self.jobs.popleft()
        self.verify_input = None
        result = method(*args)
        if self.has_trees and self.is_speculative and getattr(result, "accept_index", None) is not None:
            self._copy_tree(found)
        return result

    def _process(self, _: str, method: Callable[..., Any], batch: Any, result: Any) -> Any:
        """The oldest launch's result: from where the host came to it, its wait included."""
        found = self.launched.popleft()
        in_time = list(batch.rows_in_time())
        rows, reqs = [row for row, _ in in_time], [req for _, req in in_time]
        columns = self._columns(found, batch, result, rows, reqs)
        before = [len(req.output_ids) for req in reqs]
        method(batch, result)
        found.take(rows, reqs, before, **columns)
        begin, self.host_at = self.host_at, self._now()
        self._add(found, "process", begin, self.host_at)
        found.step["start_us"] = max(found.step["start_us"], self.processed_at)
        found.step["end_us"] = self.processed_at = self.host_at
        self._state(found.step)
        self.found.append(found)

    def _columns(
        self, found: Recorded, batch: Any, result: Any, rows: list[int], reqs: list[Any]
    ) -> dict[str, Any]:
        if found.step["kind"] == "prefill":
            return {"cached": batch.prefix_lens[rows], "seq_len": batch.seq_lens[rows]}
        starts = np.array([req.kv_len for req in reqs], dtype=np.int64)  # S: all results before are in
        table = self.scheduler.req_to_token_pool.req_to_token_host
        pool_rows = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
        columns = {name: [column[row] for row in rows] for name, column in found.columns.items()}
        columns["seq_len"] = starts
        width = 1
        if result.accept_index is None:  # plain decoding, or a method that has drafted nothing
            found.step["kind"] = "decode"
        else:
            columns["path"], width = result.accept_index[rows], result.accept_index.shape[1]
        if self.has_trees:
            name = "slots" if found.step["kind"] == "decode" else "kept_slots"
            columns[name] = slots_from(table, pool_rows, starts, width)
        return columns
