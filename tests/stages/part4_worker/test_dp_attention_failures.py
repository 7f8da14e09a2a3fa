"""A rank that dies, hangs or fails ends the run with an error that names it, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stages.part4_worker import Engine
from stages.part4_worker.managers import dp_rank
from tests.contract import models
from tests.contract.harness import REPO, Zoo

from .dp_helpers import GREEDY, TWO_RANKS, flags

pytestmark = pytest.mark.slow

TREE = (3, 2, 8)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def start(zoo):
    """start(**flags): an engine of two ranks, shut down with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(Engine(**flags(zoo, TREE, **(TWO_RANKS | more))))


def pids(engine: Engine) -> list[int]:
    return [rank.process.pid for rank in engine.scheduler.ranks]


def assert_ended(engine: Engine, gone: list[int], message: str) -> None:
    """No rank is left, every call says what happened, and shutdown finds nothing to do."""
    for pid in gone:
        with pytest.raises(ProcessLookupError):  # reaped too
            os.kill(pid, 0)
    assert engine.scheduler.is_idle()
    for call in (lambda: engine.generate(input_ids=[5, 6]), engine.get_server_info):
        with pytest.raises(RuntimeError) as again:
            call()
        assert str(again.value) == message
    engine.shutdown()


def test_a_rank_killed_in_a_run(start, zoo):
    """Its neighbour stands in a collective then, and is not the one that is named."""
    engine, prompts = start(), zoo.prompts((9, 7), 24)
    ranks, folder = pids(engine), Path(engine.scheduler.folder)
    streams = [
        engine.generate(input_ids=p, sampling_params=GREEDY, stream=True, routed_dp_rank=rank)
        for rank, p in enumerate(prompts)
    ]
    first = [next(stream) for stream in streams]
    assert folder.exists() and len(first) == 2
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^rank 1 was killed by SIGKILL during `step`") as caught:
        next(streams[0])
    aborted = next(streams[1])  # what it had produced stays readable
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and aborted["output_ids"]
    assert_ended(engine, ranks, str(caught.value))
    assert not folder.exists()


def test_a_rank_killed_while_nothing_runs(start):
    engine = start()
    ranks = pids(engine)
    os.kill(ranks[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^rank 0 was killed by SIGKILL") as caught:
        engine.flush_cache()
    assert_ended(engine, ranks, str(caught.value))


def test_a_rank_that_is_stopped(start):
    """It answers within dist_timeout or is named; its neighbour, which waits for it, is not."""
    engine = start(dist_timeout=2)
    ranks = pids(engine)
    os.kill(ranks[1], signal.SIGSTOP)
    named = r"^no answer to `step` within dist_timeout=2 s: rank 1 hangs and reacts to no signal"
    with pytest.raises(RuntimeError, match=named) as caught:
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    assert "rank 0" not in str(caught.value)
    assert_ended(engine, ranks, str(caught.value))


def test_a_rank_that_fails(start):
    """It tells what happened and where; the other rank's broken collective is not reported in its place."""
    engine = start()
    ranks, admit = pids(engine), engine.scheduler.add_request

    def spoilt(req):
        admit(req)
        req.seed = "no number"

    engine.scheduler.add_request = spoilt
    with pytest.raises(RuntimeError, match=r"^rank 1 failed \(File .*\): \w+Error: .*no number") as caught:
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, routed_dp_rank=1)
    assert_ended(engine, ranks, str(caught.value))


def test_a_refusal_sounds_as_from_one_rank(zoo, tmp_path):
    """What only loading finds comes back as the ValueError that it would be without ranks."""
    damaged = models.copy_with_config(zoo.target(), tmp_path / "target", intermediate_size=64)
    refusals = []
    for ranks in ({}, TWO_RANKS):
        with pytest.raises(ValueError) as caught:
            Engine(**flags(zoo, TREE, **ranks, model_path=str(damaged)))
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1] and "[64, 96], config.json asks for [64, 64]" in refusals[0]


SCRIPT = """
import os, signal, sys
from stages.part4_worker import Engine
engine = Engine(**{!r})
first, second = engine.scheduler.ranks
print(engine.scheduler.folder, first.process.pid, second.process.pid, flush=True)
sys.stdin.readline()
os.kill(second.process.pid, signal.SIGSTOP)
first.connection.send(("step", [], []))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_ranks_end_with_their_caller(zoo, tmp_path):
    """A script without a `__main__` guard is killed while one rank stands in a collective that never ends."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(flags(zoo, None, **TWO_RANKS)))
    caller = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    with caller:
        folder, *ranks = caller.stdout.readline().split()
        first, second = (os.pidfd_open(int(pid)) for pid in ranks)
        assert Path(folder).exists()
        caller.stdin.close()
        assert ends(first) and ends(second)
    assert caller.returncode == -signal.SIGKILL and not Path(folder).exists()


def test_a_rank_that_hangs_ends_with_its_caller_too(monkeypatch, tmp_path):
    """It is a thread that waits for the caller's end, so whatever else the process does may last for ever."""
    ours, theirs = socket.socketpair()
    codes = []
    monkeypatch.setattr(dp_rank.os, "_exit", codes.append)
    thread = threading.Thread(target=dp_rank._end_with_caller, args=(theirs.fileno(), str(tmp_path)))
    thread.start()
    ours.close()
    thread.join()
    theirs.close()
    assert codes == [0]


def ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(60_000))
    os.close(pidfd)
    return ended
