"""The draft of STANDALONE: which layers are kept, what training changes, a folder that engines load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.tools.head_helpers import VOCAB, random_text, tiny_target, write_folder
from tools.models.cache import ModelError, is_whole
from tools.models.cli import app
from tools.models.draft_distill import DistillSettings, distill, kept_layers


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), layers=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("text"), random_text(16, high=60))


def recipe(**changes):
    return DistillSettings(
        **{"layers": 3, "steps": 30, "tokens_per_batch": 256, "learning_rate": 3e-3} | changes
    )


def test_which_layers_are_kept():
    assert kept_layers(30, 6) == [0, 6, 12, 17, 23, 29] and kept_layers(5, 1) == [0]
    for count in (0, 5, 6):
        with pytest.raises(ModelError, match=r"fewer layers than its target's 5"):
            kept_layers(5, count)


def test_it_comes_nearer_to_the_target(target, text, tmp_path):
    totals = distill(target, text, tmp_path / "draft", recipe())
    assert totals["step"] == 30
    assert totals["last"]["loss"] < 0.97 * totals["first"]["loss"]
    again = distill(target, text, tmp_path / "again", recipe())
    assert (again["first"], again["last"]) == (totals["first"], totals["last"])


def test_what_is_trained_and_what_is_not(target, text, tmp_path):
    """Embedding and head are the target's own; of the layers those that were kept, in their order."""
    for name, steps in (("pruned", 0), ("taught", 2)):
        distill(target, text, tmp_path / name, recipe(steps=steps))
    whole = load_file(target / "model.safetensors")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("pruned", "taught"))
    assert len({name.split(".")[2] for name in after if "layers" in name}) == 3
    for number, kept in enumerate((0, 2, 4)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(before[name.format(number)], whole[name.format(kept)].bfloat16())
        assert not torch.equal(after[name.format(number)], before[name.format(number)])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], whole[name].bfloat16()) and len(after[name]) == VOCAB
    assert json.loads((tmp_path / "taught" / "config.json").read_text())["num_hidden_layers"] == 3
    assert is_whole(tmp_path / "taught", hashes=True)
    assert {path.name for path in tmp_path.iterdir()} == {"pruned", "taught"}, (
        "nothing half-made stays behind"
    )


def test_an_engine_drafts_with_it(target, text, tmp_path):
    from stages.spec_v2 import Engine

    distill(target, text, tmp_path / "draft", recipe(steps=2))
    common = {
        "model_path": str(target),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_total_tokens": 256,
    }
    answers = []
    for flags in (
        {},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(tmp_path / "draft")},
    ):
        with Engine(**common, **flags) as engine:
            params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
            answers.append(engine.generate(input_ids=[[5, 9, 3, 20]], sampling_params=params)[0])
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[1]["meta_info"]["spec_verify_ct"] > 0


def test_the_command_puts_it_into_the_cache(target, text, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    words = [
        "distill-draft",
        str(target),
        "--layers",
        "2",
        "--text",
        str(text),
        "--train-only",
        "--steps",
        "0",
    ]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "models" / f"{target.name}-draft" / "config.json").is_file()
    done = CliRunner().invoke(app, [*words[:2], str(tmp_path / "x"), "--layers", "9", *words[4:]])
    assert done.exit_code == 1 and "fewer layers than its target's 5" in " ".join(done.output.split())
