"""What a decode step in steady state asks of its host: an upload, its graphs, a copy of the result."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from stages.spec_v2.model_executor import device_io
from tests.contract.harness import run
from tests.contract.probe import Operations, swapped

NEW_TOKENS = 24
METHODS = {
    "plain": {},
    "3-1-4": {"tree": (3, 1, 4)},
    "3-4-8": {"tree": (3, 4, 8)},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_sends_once_replays_and_copies_once(engines, zoo, method, page):
    """Outside its graphs a job has two operations, the two copies; the scheduler beside it has none."""
    engine, prompts = engines.get(**METHODS[method], page_size=page), zoo.prompts((5, 9, 7), NEW_TOKENS)
    scheduler = engine.scheduler
    real_submit, real_replay = scheduler.forward_stream.submit, scheduler.graphs.replay
    run(engine, prompts, {"max_new_tokens": NEW_TOKENS})  # sizes are prepared
    assert engine.flush_cache()
    jobs, beside = [], []

    def submit(job, *args):
        def watched(*args):
            before, seen = device_io.counts["uploads"], []
            with Operations(seen):
                result = job(*args)
            jobs.append((device_io.counts["uploads"] - before, seen))
            return result

        is_round = job == scheduler.model_worker.forward_batch_generation
        return real_submit(watched if is_round else job, *args)

    def replay(key):
        with _disable_current_modes():
            return real_replay(key)

    def before(probe):
        beside.append([])
        probe.mode = Operations(beside[-1])
        probe.mode.__enter__()

    def after(probe):
        probe.mode.__exit__(None, None, None)

    uploads = device_io.counts["uploads"]
    with swapped(scheduler.forward_stream, "submit", submit), swapped(scheduler.graphs, "replay", replay):
        params = {"max_new_tokens": NEW_TOKENS}
        done = run(engine, prompts, params, check=False, before=before, after=after)
    assert done.tokens == [zoo.r0(prompt, **params) for prompt in prompts]
    steps = jobs[1:]  # the first is the prefill's
    assert len(steps) > 5 and steps == [(1, ["aten.copy_.default"] * 2)] * len(steps)
    assert beside[0] and not any(beside[2:]), "the last of the prefill is its result"
    assert device_io.counts["uploads"] - uploads == len(steps) + 2, "a prefill sends its table by itself"
