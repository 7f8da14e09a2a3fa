"""The head that ships: it loads, and its card says what its JSON files say."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tools.models.cache import sha256_of
from tools.models.fetch import HEADS
from tools.models.head_eval import CHAINS, TREES
from tools.models.head_model import load_head

FOLDER = HEADS / "smollm2-135m-eagle"
FOUND = json.loads((FOLDER / "acceptance.json").read_text(encoding="utf-8"))
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("section", ["held_out", "questions"])
def test_the_card_s_tables_are_the_json_s(section):
    rows = FOUND[section]["shapes"]
    assert [(row["steps"], row["topk"], row["draft_tokens"]) for row in rows] == [*CHAINS, *TREES]
    assert shapes_table(rows) in CARD
    for row in rows:
        assert len(row["acceptance"]) == row["steps"]
        assert row["tokens_per_round"] == pytest.approx(row["tokens"] / row["rounds"], abs=1e-4)


@pytest.mark.parametrize("section", ["comparison", "loops_cut"])
def test_the_card_compares_as_the_json_does(section):
    heads = FOUND[section]["heads"]
    assert heads_table(heads) in CARD
    assert heads["this head"]["head_sha256"] == FOUND["head_sha256"]


def test_the_engine_agreed():
    rows = FOUND["engine"]["shapes"]
    assert engine_table(rows) in CARD and all(row["agrees"] for row in rows)


def test_the_numbers_are_this_head_s_and_good_enough():
    assert sha256_of(FOLDER / "model.safetensors") == FOUND["head_sha256"]
    held_out, questions = (
        {shape_name(row): row["tokens_per_round"] for row in FOUND[section]["shapes"]}
        for section in ("held_out", "questions")
    )
    assert held_out["3/1/4"] >= 2.60 and held_out["3/4/8"] >= 2.80 and questions["3/1/4"] >= 2.1


def test_the_head_is_small_and_loads():
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size < 10_000_000
    head = load_head(FOLDER)  # refuses a missing, surplus or misshapen tensor
    tensors = load_file(path)
    assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors.values())
    count = sum(parameter.numel() for parameter in head.parameters())
    assert count == FOUND["parameters"] and f"{count:,} parameters" in CARD
    assert head.config.raw["tie_word_embeddings"] is False and head.config.fc_bias


def test_the_log_ends_where_the_run_did():
    record = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert all(record["totals"][key] == value for key, value in lines[-1].items())
    assert f"{record['totals']['step']:,} steps" in CARD
    assert f"{record['text']['answer_tokens']:,} answer tokens" in CARD
    assert f"--intermediate-size {record['settings']['intermediate_size']}" in CARD
