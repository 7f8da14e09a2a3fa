"""STANDALONE one step behind the device: a draft that is one token ahead, when rows come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract import models
from tests.contract.harness import run
from tests.contract.probe import Probe

from .lag import Lag, poison_on_free, rush
from .test_storms import STEPS, weather

NEW = 24
SPEC = replace(models.BASE, name="base-standalone", algorithm="STANDALONE")  # the same target as BASE


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree, page, pool, flags",
    [((3, 1, 4), 1, 128, {}), ((3, 1, 4), 4, 160, {"disable_cuda_graph": True}), ((3, 2, 8), 4, 192, {})],
)
def test_a_storm(engines, zoo, tree, page, pool, flags):
    """Requests that end, are aborted and pushed back; what is kept of them is what both models would say."""
    with engines.fresh(
        SPEC,
        tree=tree,
        page_size=page,
        max_total_tokens=pool,
        max_running_requests=5,
        chunked_prefill_size=8,
        **flags,
    ) as engine:
        with poison_on_free(engine) as freed, Lag(engine, page).open() as lag:
            weathered = weather(engine, zoo, page, STEPS)
        assert lag.holds > 100 and len(freed) > 50 and weathered.pushed_back > 3
        probe = Probe(engine)
        probe.settle()
        probe.check_idle()
        probe.check_tree_kv(zoo.ref(), zoo.ref_head(SPEC))
        assert engine.get_server_info()["avg_correct_drafts"] > 1


@pytest.mark.slow
def test_delays_change_nothing(engines, zoo):
    """Early or late: the same drafts, so the same rounds."""
    prompts = zoo.prompts((5, 9, 7, 12), NEW) * 2
    engine, seen = engines.get(SPEC, tree=(3, 1, 4), max_running_requests=3), []
    for seed in range(4):
        assert engine.flush_cache()
        with Lag(engine, seed, share=0.8).open() if seed else rush(engine):
            done = run(engine, prompts, {"max_new_tokens": NEW}, check=False)
        seen.append((done.tokens, done.rounds))
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
