"""The heads that ship: they load, and their cards say what their JSON files say."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tools.models.cache import FETCHED, sha256_of
from tools.models.fetch import HEADS
from tools.models.head_eval import CHAINS, TREES
from tools.models.head_model import load_head

# The most bytes; the fewest tokens per round: held out by a chain and a tree, on the questions by a chain.
BARS = {
    "smollm2-135m-eagle": (10_000_000, 2.60, 2.80, 2.1),
    "smollm2-135m-eagle3": (20_000_000, 2.75, 3.0, 2.1),
}


@pytest.fixture(params=BARS)
def head(request):
    folder = HEADS / request.param
    return SimpleNamespace(
        folder=folder,
        bars=BARS[request.param],
        found=json.loads((folder / "acceptance.json").read_text(encoding="utf-8")),
        card=(folder / "README.md").read_text(encoding="utf-8"),
        record=json.loads((folder / "training.json").read_text(encoding="utf-8")),
    )


def shape_name(row: dict[str, Any]) -> str:
    return f"{row['steps']}/{row['topk']}/{row['draft_tokens']}"


def markdown(title: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [title, ["---"] * len(title), *rows])


def cells(row: dict[str, Any]) -> list[str]:
    rates = " ".join(f"{rate:.3f}" for rate in row["acceptance"])
    return [shape_name(row), f"{row['tokens_per_round']:.2f}", rates]


def shapes_table(shapes: list[dict[str, Any]]) -> str:
    """The card's table of a section of `acceptance.json`."""
    return markdown(["shape", "tokens per round", "acceptance by depth"], [cells(row) for row in shapes])


def heads_table(heads: dict[str, dict[str, Any]]) -> str:
    """The card's table of two heads side by side."""
    title = ["head", "shape", "tokens per round", "acceptance by depth"]
    return markdown(title, [[name, *cells(row)] for name, head in heads.items() for row in head["shapes"]])


def engine_table(rows: list[dict[str, Any]]) -> str:
    """The card's table of the engine's count against the simulation's."""
    numbers = [[shape_name(row), f"{row['engine']:.3f}", f"{row['simulation']:.3f}"] for row in rows]
    return markdown(["shape", "engine", "simulation"], numbers)


def test_these_are_all_and_are_fetched():
    assert {path.parent.name for path in HEADS.glob("*/config.json")} == set(BARS) == set(FETCHED[1:])


@pytest.mark.parametrize("section", ["held_out", "questions"])
def test_the_card_s_tables_are_the_json_s(head, section):
    rows = head.found[section]["shapes"]
    assert [(row["steps"], row["topk"], row["draft_tokens"]) for row in rows] == [*CHAINS, *TREES]
    assert shapes_table(rows) in head.card
    for row in rows:
        assert len(row["acceptance"]) == row["steps"]
        assert row["tokens_per_round"] == pytest.approx(row["tokens"] / row["rounds"], abs=1e-4)


@pytest.mark.parametrize("section", ["comparison", "loops_cut"])
def test_the_card_compares_as_the_json_does(head, section):
    heads = head.found[section]["heads"]
    assert heads_table(heads) in head.card
    assert heads["this head"]["head_sha256"] == head.found["head_sha256"]
    for name in BARS.keys() & heads.keys():
        assert heads[name]["head_sha256"] == sha256_of(HEADS / name / "model.safetensors")


def test_the_engine_agreed(head):
    rows = head.found["engine"]["shapes"]
    assert engine_table(rows) in head.card and all(row["agrees"] for row in rows)


def test_the_numbers_are_this_head_s_and_good_enough(head):
    assert sha256_of(head.folder / "model.safetensors") == head.found["head_sha256"]
    held_out, questions = (
        {shape_name(row): row["tokens_per_round"] for row in head.found[section]["shapes"]}
        for section in ("held_out", "questions")
    )
    _, chain, tree, asked = head.bars
    assert held_out["3/1/4"] >= chain and held_out["3/4/8"] >= tree and questions["3/1/4"] >= asked


def test_the_head_is_small_and_loads(head):
    path = head.folder / "model.safetensors"
    assert path.stat().st_size < head.bars[0]
    # Refuses a missing, surplus or misshapen tensor, and a map that leads astray.
    loaded = load_head(head.folder)
    tensors = load_file(path)
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in weights.values())
    count = sum(parameter.numel() for parameter in loaded.parameters())
    assert count == head.found["parameters"] and f"{count:,} parameters" in head.card
    assert loaded.config.raw["tie_word_embeddings"] is False
    assert loaded.config.fc_bias == (loaded.hot_token_id is None), "an EAGLE head's has one, EAGLE-3's none"


def test_what_a_vocabulary_covers_stands_in_the_card(head):
    vocabulary = head.record.get("draft_vocabulary")
    if vocabulary is None:
        assert load_head(head.folder).hot_token_id is None
        return
    assert f"{vocabulary['tokens']:,} tokens" in head.card and load_head(head.folder).hot_token_id is not None
    covered, missed = head.found["coverage"], head.found["not_proposable"]
    assert covered["held_out"] == vocabulary["held_out"]
    assert covered["questions"] == pytest.approx(1 - missed["missed"] / missed["tokens"], abs=1e-5)
    parts = [f"{100 * part:.1f} %" for part in (vocabulary["training"], *covered.values())]
    assert re.findall(r"\d+\.\d %", head.card) == parts
    assert (
        f"cannot propose {missed['missed']}, and {missed['missed_by_token'][' imperialism']} of" in head.card
    )


def test_the_log_ends_where_the_run_did(head):
    lines = (head.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    assert [line["step"] for line in log] == sorted({line["step"] for line in log})
    assert all(head.record["totals"][key] == value for key, value in log[-1].items())
    assert f"{head.record['totals']['step']:,} steps" in head.card
    assert f"{head.record['text']['answer_tokens']:,} answer tokens" in head.card
    size = head.record["settings"]["intermediate_size"]
    assert f"--intermediate-size {size}" in head.card if size else "--intermediate-size" not in head.card
