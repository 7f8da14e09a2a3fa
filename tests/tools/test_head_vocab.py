"""Frequent tokens: which they are, what they cover, and the file that the engine takes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from stages.part4_worker.speculative.token_map import load_token_map
from tests.tools.head_helpers import VOCAB, random_text, tiny_target, write_folder
from tools.cli import app
from tools.models.head_data import Text
from tools.models.head_train import Settings, train
from tools.models.head_vocab import answer_counts, coverage, most_frequent

RECIPE = {"passes": 3, "tokens_per_batch": 256, "warmup": 4, "learning_rate": 1e-2, "intermediate_size": 56}


def test_answers_alone_are_counted():
    text = Text.from_rows([[9, 9, 9, 4, 5], [9, 5, 5, 6]], [3, 1], [0, 0])
    counts = answer_counts(text, 10)
    assert counts.tolist() == [0, 0, 0, 0, 1, 3, 1, 0, 0, 0]
    assert most_frequent(counts, 3).tolist() == [5, 4, 6]  # a tie goes to the lower id
    assert coverage(np.array([5, 4]), counts) == 4 / 5 and coverage(np.array([5, 40]), counts[:6]) == 3 / 4


def test_the_command_writes_what_the_engine_reads(tmp_path):
    training, held_out = random_text(40, high=60), random_text(9, seed=1)
    write_folder(tmp_path / "text", training, held_out)
    out = tmp_path / "maps" / "hot.pt"
    done = CliRunner().invoke(app, ["models", "token-map", str(tmp_path / "text"), str(out), "--size", "20"])
    assert done.exit_code == 0, done.output
    ids = torch.load(out, weights_only=True)
    counts = answer_counts(training, VOCAB)
    assert ids == most_frequent(counts, 20).tolist() and all(type(i) is int for i in ids)
    assert load_token_map(str(out), VOCAB).tolist() == sorted(ids)
    share = 100 * coverage(np.array(ids), answer_counts(held_out))
    assert f"20 tokens, {100 * coverage(np.array(ids), counts):.2f} % of the training" in done.output
    assert f"{share:.2f} % of the held-out" in done.output


def test_no_more_tokens_than_the_text_has(tmp_path):
    write_folder(tmp_path / "text", Text.from_rows([[9, 4, 5, 6]], [1], [0]))
    done = CliRunner().invoke(app, ["models", "token-map", str(tmp_path / "text"), str(tmp_path / "m.pt")])
    assert done.output.startswith("3 tokens, 100.00 % of the training answers;")


def test_a_folder_without_text_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["models", "token-map", str(tmp_path), str(tmp_path / "hot.pt")])
    assert done.exit_code == 1 and "no training text" in done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An EAGLE-3 head after a few steps, with its target and its text."""
    folder = tmp_path_factory.mktemp("eagle3")
    target = tiny_target(folder / "target", layers=7)
    text = write_folder(folder / "text", random_text(16, high=60), random_text(4, seed=1))
    settings = Settings(steps=24, algorithm="EAGLE3", draft_vocab_size=32, **RECIPE)
    train(target, text, folder / "head", settings, log_every=8)
    return folder, target, text


def test_an_eagle3_head_learns_and_says_what_it_covers(trained):
    folder, _, _ = trained
    lines = [json.loads(line) for line in (folder / "head" / "train.jsonl").read_text().splitlines()]
    assert all(lines[-1]["cross_entropy"][k] < lines[0]["cross_entropy"][k] for k in range(3))
    card = json.loads((folder / "head" / "training.json").read_text())
    counts = answer_counts(random_text(16, high=60))
    assert card["draft_vocabulary"]["tokens"] == 32
    assert card["draft_vocabulary"]["training"] == round(coverage(most_frequent(counts, 32), counts), 5)
    assert 0 < card["draft_vocabulary"]["held_out"] < 1


def test_every_part_of_an_eagle3_head_is_trained(trained):
    """And the file has the layout of published ones; a later run goes on where this one stopped."""
    folder, target, text = trained
    first = Settings(steps=1, algorithm="EAGLE3", draft_vocab_size=32, **RECIPE)
    train(target, text, folder / "first", first)
    stored, early = (load_file(folder / name / "model.safetensors") for name in ("head", "first"))
    assert stored.keys() == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }  # fmt: skip
    for name, tensor in stored.items():
        assert torch.equal(tensor, early[name]) == (name in ("d2t", "t2d")), name
    hot = (stored["d2t"] + torch.arange(32)).tolist()
    assert hot == sorted(most_frequent(answer_counts(random_text(16, high=60), VOCAB), 32).tolist())


def test_another_algorithm_does_not_go_on_in_the_same_folder(trained):
    folder, target, text = trained
    with pytest.raises(Exception, match="algorithm was 'EAGLE3' and is 'EAGLE'"):
        train(target, text, folder / "head", Settings(steps=2, **RECIPE))
