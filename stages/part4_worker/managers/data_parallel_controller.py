"""Starts the ranks of data-parallel attention, routes requests to them, makes them step, and watches them.

Restates sglang/srt/managers/data_parallel_controller.py. It stands in the caller's process where otherwise
the scheduler stands, with the same door, and holds no rank itself. The ranks step together, since they share
every MLP: a step is one message to every rank and one answer from each. So a rank that died or hangs is one
whose answer does not come; then all of them end, because none could go on.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
import time
import weakref
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import check_shards
from ..server_args import ServerArgs
from .dp_messages import pack_request, take_news
from .rank_process import RankProcess
from .schedule_batch import FinishReason, Req
from .scheduler_counters import average_correct_drafts

DIST_TIMEOUT = 300  # [s] for a step, if nothing is asked for; upstream's watchdog waits as long
_START_TIMEOUT = 1800  # [s] for loading, compiling and capturing, which dist_timeout says nothing about
_GRACE = 2.0  # [s] for ranks to die of another's death, or to write down where they stand


class DataParallelController:
    """The door of `Scheduler`, with `dp_size` schedulers behind it.

    Raises:
        ValueError: flags or a model that cannot be used, in the words that one rank would use.
        RuntimeError: a rank failed while starting.
    """

    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args
        self.dp_size = server_args.dp_size
        self.dist_timeout = server_args.dist_timeout or DIST_TIMEOUT
        self.model_config = ModelConfig.from_path(server_args.model_path, server_args.context_length)
        check_shards(self.model_config.intermediate_size, self.dp_size)
        if server_args.device == "cuda" and torch.cuda.device_count() < self.dp_size:
            raise ValueError(
                f"dp_size={self.dp_size} needs a GPU for each rank, and torch finds "
                f"{torch.cuda.device_count()}: lower tp_size and dp_size"
            )
        self.failure: str | None = None
        self._next_rank = itertools.cycle(range(self.dp_size))  # round robin
        self._live: list[dict[str, Req]] = [{} for _ in range(self.dp_size)]
        self._added: list[list[Req]] = [[] for _ in range(self.dp_size)]
        self._aborted: list[list[str]] = [[] for _ in range(self.dp_size)]
        self._start()

    def _start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="fledge-ranks-")
        self.ranks: list[RankProcess] = []
        self._waiting_for: list[RankProcess] = []
        self._answers: dict[int, Any] = {}
        # Also where nobody calls shutdown(): when this object goes, or the interpreter ends.
        self._end = weakref.finalize(self, _end_ranks, self.ranks, self.folder, os.getpid())
        try:
            for rank in range(self.dp_size):
                self.ranks.append(RankProcess(rank, self.dp_size, self.folder, self.dist_timeout))
            last_resort = max(self.dist_timeout, _START_TIMEOUT) + 60
            flags = _flags_of_a_rank(self.server_args)
            self._send({r: (r.rank, self.folder, last_resort, flags) for r in self.ranks})
            self._collect("start", _START_TIMEOUT)
        except BaseException:
            self._end()
            raise

    # ---- the scheduler's door ----

    def add_request(self, req: Req) -> None:
        """Queue a request for the next step of its rank, the next in turn unless it names one."""
        self._check()
        rank = next(self._next_rank) if req.routed_dp_rank is None else req.routed_dp_rank
        self._live[rank][req.rid] = req
        self._added[rank].append(req)

    def abort_request(self, rid: str) -> bool:
        return any(self.abort_req(reqs[rid]) for reqs in self._live if rid in reqs)

    def abort_req(self, req: Req) -> bool:
        """End a request for its caller at once, and for its rank with the next message."""
        if req.finished():
            return False
        for live, added, aborted in zip(self._live, self._added, self._aborted, strict=True):
            if live.get(req.rid) is req:
                del live[req.rid]
                if req in added:
                    added.remove(req)
                else:
                    aborted.append(req.rid)
        req.finish(FinishReason("abort", message="aborted by the caller"))
        return True

    def abort_all(self, message: str) -> None:
        for req in [req for reqs in self._live for req in reqs.values()]:
            if not req.finished():
                req.finish(FinishReason("abort", message=message))

    def live_rids(self) -> set[str]:
        return set().union(*self._live)

    def is_idle(self) -> bool:
        return not any(self._live)

    def step(self) -> bool:
        """One step of all ranks; False if none had anything to run."""
        return any(self._call("step"))

    def flush_cache(self) -> bool:
        return self.is_idle() and all(self._call("flush_cache"))

    def reset(self) -> None:
        """Empty all ranks after a step that broke off. Ranks that have failed stay ended."""
        for of_a_rank in (*self._live, *self._added, *self._aborted):
            of_a_rank.clear()
        if self.failure is None:
            self._collect("step", self.dist_timeout)  # a step that was interrupted here goes on over there
            self._call("reset")

    def get_internal_state(self) -> dict[str, Any]:
        """What the ranks have together, numbers added up; each rank's own under "internal_states"."""
        states = self._call("get_internal_state")
        total = functools.reduce(_added_up, states)
        total["avg_correct_drafts"] = average_correct_drafts(total["spec_correct_drafts_histogram"])
        return total | {"internal_states": states}

    def shutdown(self) -> None:
        self.abort_all("the engine was shut down")
        self.failure = "this engine was shut down"
        self._end()

    # ---- messages ----

    def _check(self) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def _call(self, method: str) -> list[Any]:
        """Deliver requests and aborts, run a method on every rank, take in the news; the results by rank."""
        self._check()
        if self._waiting_for:
            raise RuntimeError(
                f"{method} was called, by a signal handler perhaps, inside a step of the ranks"
            )
        # New lists before the old are sent: a stream may be collected as garbage, and so aborted, any time.
        added, self._added = self._added, [[] for _ in self.ranks]
        aborted, self._aborted = self._aborted, [[] for _ in self.ranks]
        packed = [[pack_request(req) for req in reqs] for reqs in added]
        self._send({r: (method, packed[r.rank], aborted[r.rank]) for r in self.ranks})
        self._collect(method, self.dist_timeout)
        results = []
        for rank, live in zip(self.ranks, self._live, strict=True):
            result, all_news = self._answers.pop(rank.rank)
            results.append(result)
            for rid, news in all_news:
                if (req := live.get(rid)) is None:  # aborted meanwhile
                    continue
                take_news(req, news)
                if req.finished():
                    del live[rid]
        return results

    def _send(self, messages: dict[RankProcess, tuple]) -> None:
        """One message to every rank. Where only some of them got it, none can go on."""
        for rank, message in messages.items():
            try:
                rank.connection.send(message)
            except BlockingIOError:  # it has not read for so long that the socket is full
                self._waiting_for.append(rank)
                self._fail(self._who_hangs("read", self.dist_timeout))
            except OSError:  # it is dead, and will be found so
                pass
            except BaseException:
                self._break("a message to the ranks broke off")
                raise
            self._waiting_for.append(rank)

    def _collect(self, doing: str, timeout: float) -> None:
        """Wait for the answers that are still out. An interrupt leaves the rest for another call."""
        deadline = time.monotonic() + timeout
        while self._waiting_for:
            left = deadline - time.monotonic()
            by_connection = {rank.connection: rank for rank in self._waiting_for}
            ready = wait(by_connection, max(left, 0))
            if not ready:
                self._fail(self._who_hangs(doing, timeout))
            for connection in ready:
                rank = by_connection[connection]
                try:
                    rank.receive()
                except BaseException:
                    self._break("a rank's answer broke off")
                    raise
                if rank.report is not None or rank.is_lost:
                    self._fail_for(doing)
                self._waiting_for.remove(rank)
                self._answers[rank.rank] = rank.answer

    # ---- the end ----

    def _fail_for(self, doing: str) -> NoReturn:
        """Tell whose fault it is that a rank reported an error or is gone.

        The death of one rank breaks the collectives of the others, whose reports may be here first.
        """
        deadline = time.monotonic() + _GRACE
        while not any(rank.is_lost for rank in self.ranks) and (left := deadline - time.monotonic()) > 0:
            open_ones = {r.connection: r for r in self.ranks if r.report is None}
            for connection in wait(open_ones, left):
                open_ones[connection].receive()
            if not open_ones:
                break
        lost = [rank for rank in self.ranks if rank.is_lost]
        guilty = lost[0] if lost else min((r for r in self.ranks if r.report), key=lambda r: r.report)
        if guilty.report is not None and guilty.report[1] == "ValueError" and doing == "start":
            self._fail(guilty.report[2], ValueError)  # a refusal in the words of one rank
        self._fail(f"{guilty.describe_end()} during `{doing}`")

    def _who_hangs(self, doing: str, timeout: float) -> str:
        silent = list(self._waiting_for)
        for rank in silent:
            rank.ask_where()
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not all(rank.where() for rank in silent):
            time.sleep(0.01)
        # Who waits for another rank, or for the device on which another rank is waited for, is not to blame.
        guilty = [rank for rank in silent if not rank.is_waiting()] or silent
        names = " and ".join(rank.describe_hang() for rank in guilty)
        limit = f"dist_timeout={timeout} s" if doing != "start" else f"{timeout} s"
        return f"no answer to `{doing}` within {limit}: {names}"

    def _fail(self, message: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        self._break(message)
        raise kind(self.failure if kind is RuntimeError else message)

    def _break(self, message: str) -> None:
        self.failure = f"{message}; all ranks were ended, make a new engine"
        self._end()


def _end_ranks(ranks: list[RankProcess], folder: str, caller: int) -> None:
    if os.getpid() != caller:  # a fork of the caller ends, and they are none of its business
        return
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()
    shutil.rmtree(folder, ignore_errors=True)


def _flags_of_a_rank(args: ServerArgs) -> dict[str, Any]:
    """Each rank takes its part of the requests; the pools are per rank, as upstream's are."""
    flags = args.to_dict()
    return flags | {"max_running_requests": max(1, args.max_running_requests // args.dp_size)}


def _added_up(one: Any, other: Any) -> Any:
    """Numbers of two ranks added, inside lists and dicts too; of anything else the first."""
    if isinstance(one, dict):
        return {name: _added_up(value, other[name]) for name, value in one.items()}
    if isinstance(one, list):
        return [_added_up(a, b) for a, b in itertools.zip_longest(one, other, fillvalue=0)]
    return one if isinstance(one, (bool, str)) else one + other
