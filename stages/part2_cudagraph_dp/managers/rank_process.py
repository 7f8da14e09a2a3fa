"""One rank as its caller sees it: a process, a connection to it, and a file that says where it stands.

The rank's side is in dp_rank.py. Nothing here blocks for ever: a rank that does not read makes `send` fail,
and one that does not answer is asked by a signal, which works inside a collective too.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_END_TIMEOUT = 30  # [s] for the system to take down a process that was killed
# Where a rank stands that waits for others: in a collective, or for its device, which waits in one.
_WAITING = re.compile(r"(dp_attention|device_io)\.py")


class RankProcess:
    """Starts rank `rank`, to meet the others in `folder`; it has `send_timeout` [s] to read a message."""

    def __init__(self, rank: int, dp_size: int, folder: str, send_timeout: int):
        self.rank = rank
        self.answer: Any = None
        # What it died of: when [s], the error's kind, its message, its traceback.
        self.report: tuple[float, str, str, str] | None = None
        self.is_lost = False  # gone without a word
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_timeout, 0))
        self._stack = tempfile.TemporaryFile()
        module, root = _module_and_root()
        fds = (theirs.fileno(), self._stack.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, fds), folder],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is the caller's; it may interrupt one call and go on
            env=_environment(root, dp_size),
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def receive(self) -> None:
        """Take the next message: an answer, a report of an error, or the end of the connection."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self.is_lost = self.report is None
            return
        if kind == "error":
            self.report = content
        else:
            self.answer = content

    def describe_end(self) -> str:
        """Who it is and what it died of."""
        if self.report is not None:
            _, kind, message, trace = self.report
            place = next((line.strip() for line in reversed(trace.splitlines()) if "File " in line), "")
            return f"rank {self.rank} failed ({place}): {kind}: {message}"
        try:
            code = self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} closed its connection"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"rank {self.rank} was killed by {name}{self._last_place()}"
        return f"rank {self.rank} ended with exit code {code}"

    # ---- a rank that does not answer ----

    def ask_where(self) -> None:
        """Make it write its stack; `where` reads that."""
        # The file's offset is shared with the rank, so it is set here and never moved by reading.
        os.lseek(self._stack.fileno(), 0, os.SEEK_SET)
        os.ftruncate(self._stack.fileno(), 0)
        os.kill(self.process.pid, signal.SIGUSR1)

    def where(self) -> str:
        return os.pread(self._stack.fileno(), 1 << 16, 0).decode(errors="replace")

    def is_waiting(self) -> bool:
        return _WAITING.search(self.where()) is not None

    def describe_hang(self) -> str:
        return f"rank {self.rank} hangs{self._last_place() or ' and reacts to no signal (was it stopped?)'}"

    def _last_place(self) -> str:
        frame = next((line.strip() for line in self.where().splitlines() if "File " in line), None)
        return f" at {frame}" if frame else ""

    # ---- the end ----

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Wait until the process is gone, and let go of everything."""
        self.process.wait(_END_TIMEOUT)
        self.connection.close()
        self._stack.close()


def _module_and_root() -> tuple[str, Path]:
    """Name of the rank's module, and the folder it is imported from; this package's own name may differ."""
    folder = Path(__file__).resolve().parents[1]
    names = [folder.name]
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
        names.insert(0, folder.name)
    return ".".join([*names, "managers", "dp_rank"]), folder.parent


def _environment(root: Path, dp_size: int) -> dict[str, str]:
    """This process's, with its import paths, and its threads shared out among the ranks."""
    paths = [*filter(None, sys.path), str(root)]  # last: what lies beside a copied stage hides nothing
    threads = max(1, (os.cpu_count() or 1) // dp_size)
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
