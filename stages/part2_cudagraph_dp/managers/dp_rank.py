"""One rank of data-parallel attention: a process with a scheduler of its own, which steps when it is told to.

Started by data_parallel_controller.py as `python -m <package>.managers.dp_rank`. Restates
run_scheduler_process of sglang/srt/managers/scheduler.py: upstream's ranks run a loop of their own and look
for messages between steps; here every step is asked for and answered, so that waiting costs nothing and a
rank that hangs is noticed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..engine import load_tokenizer
from ..layers.dp_attention import initialize_dp_attention
from ..server_args import ServerArgs
from .dp_messages import Progress, unpack_request
from .scheduler import Scheduler


class DataParallelRank:
    """What a rank does between two messages; `flags` are the engine's keywords."""

    def __init__(self, rank: int, folder: str, timeout: float, flags: dict[str, Any]):
        args = ServerArgs.from_kwargs(**flags)
        logging.basicConfig(format=f"dp rank {rank}: %(message)s")
        logging.getLogger(__package__.rpartition(".")[0]).setLevel(args.log_level.upper())
        self.group = initialize_dp_attention(
            rank, args.dp_size, torch.device(args.device), os.path.join(folder, "store"), timeout
        )
        self.tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args)
        self.scheduler = Scheduler(args)
        self.running: dict[str, Progress] = {}

    def call(self, method: str, added: list[dict], aborted: list[str]) -> tuple[Any, list[tuple]]:
        """Take aborts and new requests, run a method; its result, and what is new: pairs of rid and news."""
        for rid in aborted:
            self.scheduler.abort_request(rid)
            self.running.pop(rid, None)  # the caller has ended it already
        for message in added:
            req = unpack_request(message, self.scheduler.model_config, self.tokenizer)
            self.running[req.rid] = Progress(req)
            self.scheduler.add_request(req)
        result = getattr(self, method)()
        news = [(rid, told) for rid, one in self.running.items() if (told := one.news()) is not None]
        for rid, _ in news:
            if self.running[rid].req.finished():
                del self.running[rid]
        return result, news

    def step(self) -> bool:
        return self.scheduler.step()

    def flush_cache(self) -> bool:
        return self.scheduler.flush_cache()

    def reset(self) -> None:
        self.running.clear()
        self.scheduler.reset()

    def get_internal_state(self) -> dict[str, Any]:
        return self.scheduler.get_internal_state() | {"num_collectives": self.group.count}

    def collectives(self) -> tuple[int, list[tuple]]:
        """How many were entered, and the last of them, for comparison with another rank's."""
        return self.group.count, list(self.group.log)


def main() -> None:
    connection, stack, folder = Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # the caller asks where this rank stands
    threading.Thread(target=_end_with_caller, args=(connection.fileno(), folder), daemon=True).start()
    if "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the ranks share a host, whatever its name resolves to
    try:
        rank = DataParallelRank(*_receive(connection))
        answer = None
        while True:
            connection.send(("answer", answer))
            answer = rank.call(*_receive(connection))
    except BaseException as error:
        report = time.monotonic(), type(error).__name__, str(error), traceback.format_exc()
        with contextlib.suppress(OSError):
            connection.send(("error", report))
        os._exit(1)  # no tidying up: the others stand in a collective that cannot end


def _receive(connection: Connection) -> tuple:
    try:
        return connection.recv()
    except EOFError:
        signal.pause()  # the thread ends it


def _end_with_caller(fd: int, folder: str) -> None:
    """End this process as soon as the other end of its connection is gone, whatever it is doing.

    `folder` is the caller's, for the ranks to meet in; a caller that was killed has not removed it.
    """
    poll = select.poll()
    poll.register(fd, 0)  # hang-up alone; what can be read is another's
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
