"""The embedded model in every stage: the same text from all of them, plain and drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

import stages
from tests.contract.harness import Stage

NAMES = sorted(path.parent.name for path in Path(stages.__file__).parent.glob("*/stage.toml"))
PROMPTS = ["What is the capital of France, and what is it known for?", "Three tips for learning to cook:"]
NEW = 12


def answers(
    name: str, target: Path, head: Path | None, algorithm: str = "EAGLE", **params
) -> tuple[list[list[int]], float]:
    """What a stage answers, and the tokens of a round."""
    flags = {"model_path": str(target), "device": "cpu", "max_total_tokens": 512}
    if head is not None:
        flags |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
        flags |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    with Stage(name).Engine(**flags) as engine:
        results = engine.generate(PROMPTS, {"max_new_tokens": NEW, "ignore_eos": True, **params})
    rounds = sum(result["meta_info"].get("spec_verify_ct", NEW - 1) for result in results)
    return [result["output_ids"] for result in results], (NEW - 1) * len(results) / rounds


@pytest.fixture(scope="module")
def plain(target_path):
    return answers(NAMES[-1], target_path, None, temperature=0)[0]


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_changes_nothing_but_the_rounds(name, target_path, head_path, plain):
    drafted, tokens_per_round = answers(name, target_path, head_path, temperature=0)
    assert drafted == plain
    assert tokens_per_round > 1.2


@pytest.mark.model
@pytest.mark.parametrize("name", [name for name in NAMES if Stage(name).has("eagle3")])
def test_neither_does_the_eagle3_head(name, target_path, head_path, plain):
    head = head_path.with_name("smollm2-135m-eagle3")
    drafted, tokens_per_round = answers(name, target_path, head, "EAGLE3", temperature=0)
    assert drafted == plain
    assert tokens_per_round > 1.3


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES[:-1])
def test_plain_decoding_is_the_same_in_every_stage(name, target_path, plain):
    assert answers(name, target_path, None, temperature=0)[0] == plain
