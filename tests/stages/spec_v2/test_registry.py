"""Methods from outside the package: the rules of the registry, and one that runs."""

from __future__ import annotations

import pytest

from stages.spec_v2.server_args import PLUGIN_ALGORITHMS, ServerArgs
from stages.spec_v2.speculative import spec_registry
from stages.spec_v2.speculative.eagle_worker_v2 import EAGLEWorkerV2
from stages.spec_v2.speculative.spec_info import SpeculativeAlgorithm
from stages.spec_v2.speculative.spec_registry import CustomSpecAlgo
from tests.contract.harness import run
from tests.contract.probe import Probe

from .lag import Lag
from .repeat_worker import RepeatWorker

register = SpeculativeAlgorithm.register


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(spec_registry, "_registry", {})
    before = dict(PLUGIN_ALGORITHMS)
    yield
    PLUGIN_ALGORITHMS.clear()
    PLUGIN_ALGORITHMS.update(before)


def worker_of_eagle(server_args):
    return EAGLEWorkerV2


def args(**flags):
    return ServerArgs.from_kwargs(model_path="m", device="cpu", **flags)


# ---- the rules ----


@pytest.mark.parametrize("name", ["eagle", "EAGLE3", "Standalone", "ngram", "none", "NextN"])
def test_names_of_built_in_algorithms_are_reserved(name):
    """Those of methods that are refused so far too: a plug-in must not take their place."""
    with pytest.raises(ValueError, match=f"'{name}' is reserved"):
        register(name)


def test_a_name_is_taken_when_the_decorator_is_applied():
    first, second = register("mine"), register("MINE")  # nothing is stored yet
    assert first(worker_of_eagle) is worker_of_eagle, "the factory comes back unchanged"
    for again in (lambda: register("Mine"), lambda: second(worker_of_eagle)):
        with pytest.raises(ValueError, match="registered already"):
            again()


def test_a_spec_class_answers_what_the_built_in_ones_answer():
    class Deaf:
        def is_none(self):
            return False

    with pytest.raises(TypeError, match=r"Deaf lacks is_speculative, is_eagle, is_eagle3, supports_overlap"):
        register("deaf", spec_class=Deaf)


def test_names_are_looked_up_in_any_case():
    register("Mine", supports_overlap=True)(worker_of_eagle)
    spec = SpeculativeAlgorithm.from_string("mINE")
    assert isinstance(spec, CustomSpecAlgo) and spec.name == "MINE"
    assert (spec.is_none(), spec.is_speculative(), spec.is_eagle()) == (False, True, False)
    assert SpeculativeAlgorithm.from_string("NextN") is SpeculativeAlgorithm.EAGLE
    assert SpeculativeAlgorithm.from_string(None) is SpeculativeAlgorithm.NONE
    with pytest.raises(ValueError, match="Unknown speculative algorithm name: other"):
        SpeculativeAlgorithm.from_string("other")


def test_overlap_is_refused_where_it_is_not_supported():
    register("slow")(worker_of_eagle)
    spec = SpeculativeAlgorithm.from_string("slow")
    with pytest.raises(ValueError, match="disable_overlap_schedule=True"):
        spec.create_worker(args(speculative_algorithm="slow"))
    with pytest.warns(DeprecationWarning, match="SLOW"):
        made = spec.create_worker(args(speculative_algorithm="slow", disable_overlap_schedule=True))
    assert made is EAGLEWorkerV2


def test_flags_are_checked_by_whoever_registered():
    def validate(server_args):
        if server_args.page_size > 1:
            raise ValueError("MINE cannot do with pages: leave page_size out")

    register("mine", supports_overlap=True, validate_server_args=validate)(worker_of_eagle)
    assert args(speculative_algorithm="Mine").speculative_algorithm == "MINE"
    with pytest.raises(ValueError, match="cannot do with pages"):
        args(speculative_algorithm="mine", page_size=4)
    with pytest.raises(ValueError, match="leave enable_dp_attention out"):
        args(speculative_algorithm="mine", enable_dp_attention=True, dp_size=2, tp_size=2)


def test_who_is_not_registered_is_refused_by_name(engines):
    with pytest.raises(ValueError, match="choose one of EAGLE"):
        engines.fresh(speculative_algorithm="MINE")


# ---- one that runs ----


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_plug_in_runs(engines, zoo, page, overlaps):
    """Lossless with requests that come and go, sampled and scored ones among them; some guesses are right."""
    register("repeat", supports_overlap=True)(lambda server_args: RepeatWorker)
    prompts = zoo.prompts((5, 9, 7, 12), 24)
    favourite = {"logit_bias": {"7": 30.0}, "max_new_tokens": 17}
    params = [
        {"max_new_tokens": 24},
        favourite,
        {"max_new_tokens": 9},
        {"temperature": 0.8, "sampling_seed": 3},
    ]
    flags = {"page_size": page, "disable_overlap_schedule": not overlaps, "max_total_tokens": 256}
    wanted = run(engines.get(**flags), prompts, [params[0], favourite, params[2], params[3]], check=False)
    with engines.fresh(speculative_algorithm="Repeat", speculative_num_draft_tokens=4, **flags) as engine:
        done = run(engine, prompts, params, ref=zoo.ref(), return_logprob=[False, True, False, False])
        assert done.tokens[:3] == wanted.tokens[:3] and len(done.tokens[3]) == 16
        metas = [result["meta_info"] for result in done.results]
        assert metas[0]["spec_num_proposed_drafts"] == 3 * metas[0]["spec_verify_ct"]
        assert done.tokens[1] == [7] * 17 and metas[1]["spec_verify_ct"] == 4
        assert len(metas[1]["output_token_logprobs"]) == 17
        assert Probe(engine).tree.lookahead == 0, "without a draft model a key is a token"
        if overlaps:
            with Lag(engine, 2).open():
                assert run(engine, prompts, params, check=False).tokens[:3] == wanted.tokens[:3]


def test_a_subclass_of_a_built_in_worker_runs(engines, zoo):
    """And says of itself that it drafts as EAGLE does, so that prefixes are keyed by pairs."""

    class LikeEagle(CustomSpecAlgo):
        def is_eagle(self):
            return True

    class Counting(EAGLEWorkerV2):
        rounds = 0

        def draft(self, batch):
            Counting.rounds += 1
            return super().draft(batch)

    register("counting", supports_overlap=True, spec_class=LikeEagle)(lambda server_args: Counting)
    prompts = zoo.prompts((5, 9), 16)
    with engines.fresh(tree=(3, 2, 8), speculative_algorithm="counting") as engine:
        done = run(engine, prompts, ref=zoo.ref(), ref_head=zoo.ref_head())
        assert done.tokens == [zoo.r0(p) for p in prompts]
        assert Counting.rounds >= max(len(rounds) for rounds in done.rounds)
