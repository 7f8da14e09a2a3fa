"""NGRAM one step behind the device: what its rounds wait for, what becomes of words that come too late."""

from __future__ import annotations

import pytest

from stages.spec_v2.model_executor import device_io
from tests.contract.harness import run
from tests.contract.probe import Probe

from .lag import Lag, poison_on_free, rush
from .test_storms import STEPS, weather

NEW = 24
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}


@pytest.mark.slow
@pytest.mark.parametrize("page, pool, flags", [(1, 144, {}), (4, 176, {"disable_cuda_graph": True})])
def test_a_storm(engines, zoo, page, pool, flags):
    """Requests that end, are aborted and pushed back; few nodes, so that much is forgotten on the way."""
    with engines.fresh(
        **NGRAM,
        page_size=page,
        max_total_tokens=pool,
        max_running_requests=5,
        chunked_prefill_size=8,
        speculative_ngram_capacity=3000,
        **flags,
    ) as engine:
        with poison_on_free(engine) as freed, Lag(engine, page).open() as lag:
            weathered = weather(engine, zoo, page, STEPS)
        assert lag.holds > 100 and len(freed) > 50 and weathered.pushed_back > 3
        probe = Probe(engine)
        probe.settle()
        probe.check_idle()
        probe.check_tree_kv(zoo.ref())
        assert engine.get_server_info()["avg_correct_drafts"] > 0.3
        worker = engine.scheduler.draft_worker
        assert worker.corpus.size <= 3000 and len(worker._ids) <= 5 and len(worker._unread) <= 2


def test_delays_change_nothing(engines, zoo):
    """Early or late: the same trees, so the same rounds."""
    prompts = zoo.prompts((5, 9, 7, 12), NEW) * 2
    engine, seen = engines.get(**NGRAM, max_running_requests=3), []
    for seed in range(4):
        assert engine.flush_cache()
        with Lag(engine, seed, share=0.8).open() if seed else rush(engine):
            done = run(engine, prompts, {"max_new_tokens": NEW}, check=False)
        seen.append((done.tokens, done.rounds))
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_only_read_is_that_of_the_last_result(engines, zoo, overlaps):
    """Scheduler and worker both want it, and one of them waits."""
    engine = engines.get(**NGRAM, disable_overlap_schedule=not overlaps)
    run(engine, zoo.prompts((5, 9, 7), NEW), {"max_new_tokens": 6})  # sizes are prepared
    assert engine.flush_cache()
    before, steps = dict(device_io.counts), []
    run(
        engine,
        zoo.prompts((5, 9, 7), NEW),
        {"max_new_tokens": NEW},
        check=False,
        after=lambda probe: steps.append(None),
    )
    counted = {name: device_io.counts[name] - before[name] for name in before}
    assert counted["downloads"] == len(steps) - overlaps, "with overlap the last step launches nothing"


def test_a_prefill_waits_for_nothing_and_its_prompt_is_taken_in(engines, zoo):
    """A prompt is known to the corpus before anybody has read what came behind it."""
    engine, prompt = engines.get(**NGRAM), zoo.prompts((12,), NEW)[0]
    worker, sizes = engine.scheduler.draft_worker, []
    probe = Probe(engine)
    with probe.spy(worker, "forward_extend", lambda a, k, r: sizes.append((worker.corpus.size, r._on_host))):
        run(engine, [prompt], {"max_new_tokens": 4}, check=False)
    (size, on_host), *rest = sizes
    assert not rest and size > 2 * 12 and on_host is None


def test_chunks_begin_when_the_prompt_is_whole(engines, zoo):
    prompt = zoo.prompts((14,), NEW)[0]
    whole, parts = (engines.get(**NGRAM, chunked_prefill_size=size) for size in (-1, 4))
    sizes = []
    for engine in (whole, parts):
        done = run(engine, [prompt], {"max_new_tokens": NEW})
        sizes.append((engine.scheduler.draft_worker.corpus.size, done.rounds[0]))
        assert done.tokens == [zoo.r0(prompt, max_new_tokens=NEW)]
    assert sizes[0] == sizes[1]


def test_late_words_of_a_row_that_changed_hands(engines, zoo, monkeypatch):
    """The round that a request left behind is not taken for words of who has its row now, nor kept for it."""
    monkeypatch.setenv("FLEDGE_NGRAM", "python")
    prompts = zoo.prompts((5, 9, 7), NEW)
    with engines.fresh(**NGRAM, max_running_requests=1, disable_radix_cache=True) as engine:
        corpus, words = engine.scheduler.draft_worker.corpus, {}
        real = corpus.append

        def append(ids, runs):
            for i, run_ in zip(ids, runs, strict=True):
                words.setdefault(i, []).extend(run_)
            real(ids, runs)

        corpus.append = append
        done = run(engine, prompts, {"max_new_tokens": NEW})
        assert list(corpus.requests) == [2], "whose rows are others' now have no trie of their own"
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts] and sorted(words) == [0, 1, 2]
    for prompt, output, heard in zip(prompts, done.tokens, words.values(), strict=True):
        said = [*prompt, *output]
        both = min(len(heard), len(said))
        assert heard[:both] == said[:both] and both > len(said) - 6
