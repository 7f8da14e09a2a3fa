"""Which of the suite a stage runs when no stage is asked for by name, as in `make test`.

The whole of it runs where the trees are, and on any stage with `--stage NAME`. The stages before share most
of their files with that one to the byte, and there every file is tested: what is left to find is a mistake
of carving, in a file that differs or in what two files expect of one another. That takes every kind of run
once; what takes long and could only fail in a shared file is left out here. A stage whose scheduler overlaps
is tested a second time without: that takes the files in which it matters when a result is processed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .harness import Stage

_LAW = "how often each token is drawn follows from which one is, and that a sampled text is plain decoding's"
_LAW += " own is tested in tests/stages"
_SOAK = "a leak would show in a shorter run, whose owners of slots are checked after every step"

# Test → why it is left out.
LEFT_OUT = {
    "test_triton.py::test_short_runs": "minutes in the interpreter, for kernels that the stages share",
    "test_real_model.py::test_plain_greedy_is_the_references": "tests/stages/test_real_model.py is shorter",
    "test_real_model.py::test_lossless_and_as_fast_as_simulated": "the same",
    "test_real_model.py::test_draft_kv_of_the_real_head": "the same; KV of tiny heads is checked each step",
    "test_sampling_law.py::test_joint_law_at_temperature_one": _LAW,
    "test_sampling_law.py::test_filters": _LAW,
    "test_sampling_law.py::test_filters_plain": _LAW,
    "test_sampling_law.py::test_the_final_draw_has_a_number_of_its_own": _LAW,
    "test_sampling_law.py::test_a_head_that_knows_nothing_does_not_bend_the_law": _LAW,
    "test_sampling_law.py::test_poisoned_memory_does_not_bend_the_law": _LAW,
    "test_counts.py::test_twenty_identical_runs": _SOAK,
    "test_scheduling.py::test_many_requests_leave_the_pool_full": _SOAK,
}


TWICE = {
    "test_counts.py",
    "test_cuda_graphs.py",
    "test_draft_state.py",
    "test_logprobs.py",
    "test_lossless.py",
    "test_methods_adaptive.py",
    "test_methods_multi_layer.py",
    "test_methods_standalone.py",
    "test_methods_ngram.py",
    "test_metrics.py",
    "test_penalties.py",
    "test_poison.py",
    "test_prefix_cache.py",
    "test_rejection_sampling.py",
    "test_scheduling.py",
    "test_termination.py",
}


def is_chosen(stage: Stage, file: str, test: str) -> bool:
    """Whether `make test` runs a test of the suite on a stage."""
    return stage.has("tree") or f"{file}::{test}" not in LEFT_OUT


def is_second_time(stage: Stage, file: str, test: str) -> bool:
    """Whether the stage is one that overlaps, tested without, and the test is not for that."""
    again = stage.has("overlap") and not stage.overlaps
    return again and (file not in TWICE or f"{file}::{test}" in LEFT_OUT)
