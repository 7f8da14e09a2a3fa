"""What `fledge bench` and the other measurements make of an engine whose results come one step late."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from tests.contract.probe import Probe
from tools.bench import steady
from tools.bench.bench_process import run_job
from tools.bench.measure import measure, model_forwards, step_phases, timed_run, wrap
from tools.bench.stages_door import resolve_stage

PART4, SPEC_V2 = resolve_stage("part4_worker"), resolve_stage("spec_v2")
WAVES = [[[5, 6, 7], [9, 8, 7, 6]], [[11, 12], [13, 14, 15]]]
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
COMMON = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 8,
          "disable_radix_cache": True}  # fmt: skip


@pytest.fixture(scope="module")
def flags(tiny_flags) -> dict:
    return tiny_flags | COMMON | CHAIN | {"speculative_algorithm": "EAGLE"}


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def chain(request, flags):
    with SPEC_V2.open(**flags, disable_overlap_schedule=not request.param) as engine:
        yield engine


def overlap_is_on(engine) -> bool:
    return engine.get_server_info()["is_on"]["overlap_schedule"]


def test_a_run_has_the_rounds_of_the_stage_before(flags, chain) -> None:
    with PART4.open(**flags) as engine:
        wanted, expected = timed_run(engine, WAVES, 9, ignore_eos=True)
    run, results = timed_run(chain, WAVES, 9, ignore_eos=True)
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in expected]
    # A step that waits for a prefill is the prefill's, and the round launched too much is nobody's.
    assert (run.steps, run.rounds) == (wanted.steps, wanted.rounds)
    launched = chain.get_server_info()["forward_ct_decode"]
    assert launched == wanted.steps + (2 if overlap_is_on(chain) else 0)
    assert 0 < run.prefill_seconds < run.seconds


def test_steady_rounds_are_whole_rounds(chain, monkeypatch) -> None:
    """On the forward stream's thread a round may begin before it is looked at, and end after."""
    forwards: Counter = Counter()
    real = steady._forwards

    @contextmanager
    def counting(engine):
        def count(phase, method, *args, **kwargs):
            forwards[phase] += 1
            return method(*args, **kwargs)

        with real(engine) as parts, wrap(model_forwards(engine), count):
            yield parts

    monkeypatch.setattr(steady, "_forwards", counting)
    found = steady.steady(chain, WAVES[0], 24)
    Probe(chain).check_idle()
    assert forwards == {"target": 1, "draft": 3}
    assert set(found.phases) == {"target", "draft"} and len(found.rounds) > 2 and found.host
    assert 4 < found.context < 4 + 24


def test_what_is_hidden_is_no_host_time(chain) -> None:
    for spots in (step_phases(chain), model_forwards(chain)):
        with measure(chain, spots, counters=True) as cost:
            (out,) = chain.generate(
                input_ids=WAVES[0][:1], sampling_params={"temperature": 0, "max_new_tokens": 9}
            )
        rounds = out["meta_info"]["spec_verify_ct"] + overlap_is_on(chain)  # one is launched too much
        assert (cost.target_forwards, cost.draft_forwards) == (1 + rounds, 1 + 3 * rounds)
        assert ("process" in cost.seconds) is not overlap_is_on(chain)
        worked = {name: cost.seconds[name] for name in spots if name != "commit"}
        assert all(seconds > 0 for seconds in worked.values()), worked
        assert 0 < cost.rest < cost.total and sum(worked.values()) + cost.rest <= cost.total * 1.0001


def test_on_a_gpu_nobody_waits_for_a_phase(flags, fake_gpu, monkeypatch) -> None:
    """Under overlap that would undo it: events say what a phase took."""
    waits: list[None] = []
    with SPEC_V2.open(**flags) as engine:
        real = engine.get_server_info
        monkeypatch.setattr(engine, "get_server_info", lambda: real() | {"device": "cuda"})
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
        with measure(engine, step_phases(engine), counters=True) as cost:
            (out,) = engine.generate(
                input_ids=WAVES[0][:1], sampling_params={"temperature": 0, "max_new_tokens": 9}
            )
    rounds = out["meta_info"]["spec_verify_ct"] + 1
    phases = {name: cost.seconds[name] for name in ("prefill", "draft", "verify", "draft extend")}
    assert phases == pytest.approx({"prefill": 1e-3} | dict.fromkeys([*phases][1:], rounds * 1e-3))
    assert len(waits) == 1 and "process" not in cost.seconds


def test_a_method_without_a_draft_model_is_measured_like_any_other(plug_in) -> None:
    flags = plug_in | {"max_total_tokens": 2048, "max_running_requests": 8}
    said: list[dict] = []
    sets = [{"name": "questions", "questions": ["ab cd", "foo"], "new_tokens": 24, "ignore_eos": True}]
    job = {"stage": "spec_v2", "sets": sets, "new_tokens": None, "repeat": 1, "seconds": 9.0, "raw": True,
           "steady": True}  # fmt: skip
    job["configurations"] = [{"name": "repeat", "kind": "engine", "batches": [2], "flags": flags}]
    run_job(job, lambda event, **more: said.append({"event": event, **more}))
    assert said[-1]["error"] is None
    events = {event["event"]: event for event in said}
    assert events["cell"]["tokens"] == [48] and events["cell"]["rounds"][0] > 0
    assert set(events["steady"]["phases"]) == {"target"} and events["steady"]["context"] > 0
