"""Part 3 has part 2's ranks, beside a scheduler that speculates where there is one rank only."""

from __future__ import annotations

import pytest

from stages.part3_scheduler import Engine
from tests.contract.harness import Zoo
from tests.stages.part4_worker.dp_helpers import (
    TWO_RANKS,
    check_plain_answers,
    check_plain_graphs_of_one_busy_rank,
    flags,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def two(zoo):
    with Engine(**flags(zoo, **TWO_RANKS, cuda_graph_bs=[1, 2, 4])) as engine:
        yield engine


def test_two_ranks_answer_like_one(zoo, two):
    check_plain_answers(zoo, two)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_without_requests_takes_the_graphs_of_the_other(zoo, two, busy):
    check_plain_graphs_of_one_busy_rank(zoo, two, busy)


def test_eagle_under_dp_attention_is_refused(zoo):
    with pytest.raises(ValueError, match="part3_scheduler does not have EAGLE under.*part4_worker"):
        Engine(**flags(zoo, (3, 1, 4), chunked_prefill_size=-1, **TWO_RANKS))
