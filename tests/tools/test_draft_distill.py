"""A draft distilled from its target: the fit is the least squares one, a run resumes, the folder says what
the trained model says.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.tools.head_helpers import HIDDEN, VOCAB, random_text, tiny_target, write_folder
from tools.models import draft_distill
from tools.models.cache import ModelError
from tools.models.draft_distill import (
    DistillSettings,
    DraftModel,
    batch_loss,
    chain_rounds,
    distill,
    fit_lens,
    read_layers,
    tokens_per_round,
)
from tools.models.head_batches import Feed
from tools.models.head_model import FrozenTarget


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("text"), random_text(16, high=60), random_text(4, seed=9))


def recipe(**changes):
    common = {"layers": (0, 3), "steps": 6, "tokens_per_batch": 256, "warmup": 2, "fit_tokens": 300}
    return DistillSettings(**{**common, **changes})


def test_all_layers_are_the_target_itself(target):
    """Nothing is lost by the way it is taken apart: the lens is found to be the identity."""
    frozen = FrozenTarget(target)
    model, feed = DraftModel(frozen, range(4)), Feed(random_text(16), frozen, 2**30)
    batches = [feed.batch(128, [i]) for i in range(8)]
    torch.testing.assert_close(model(batches[0].tokens), batches[0].hidden, atol=1e-4, rtol=1e-4)
    fit_lens(model, batches, 10**6)
    torch.testing.assert_close(model.lens.data, torch.eye(HIDDEN), atol=0.1, rtol=0)


def test_the_lens_is_nearer_than_without(target):
    """And it is the least squares solution: a small step into any direction makes it worse."""
    frozen = FrozenTarget(target)
    model, feed = DraftModel(frozen, (0, 1)), Feed(random_text(32, low=50), frozen, 2**30)
    batch = feed.batch(128, list(range(32)))

    def distance():
        student = model(batch.tokens).flatten(0, 1)[batch.targets]
        return float((student - batch.hidden.flatten(0, 1)[batch.targets]).square().sum())

    with torch.no_grad():
        before = distance()
        fit_lens(model, [batch], 1)
        fitted, lens = distance(), model.lens.clone()
        assert fitted < 0.9 * before
        for seed in range(3):
            step = torch.randn(lens.shape, generator=torch.Generator().manual_seed(seed)) * 0.03
            model.lens.copy_(lens + step)
            assert distance() > fitted


def test_only_as_much_is_read_as_was_asked_for(target):
    frozen = FrozenTarget(target)
    feed, read = Feed(random_text(16), frozen, 2**30), []

    def batches():
        for number in range(16):
            read.append(number)
            yield feed.batch(128, [number])

    fit_lens(DraftModel(frozen, (0,)), batches(), 1)
    assert read == [0]


def test_the_loss_falls_and_embedding_and_head_stay(target, text, tmp_path):
    totals = distill(target, text, tmp_path, recipe(steps=30, learning_rate=3e-3), log_every=10)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert lines[-1]["cross_entropy"][0] < lines[0]["cross_entropy"][0] and totals["step"] == 30
    kept = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].float()
    own = FrozenTarget(target).embedding
    torch.testing.assert_close(kept, own.bfloat16().float(), atol=0, rtol=0)
    assert set(totals["tokens_per_round"]) == {"1", "3", "5"}


def test_the_folder_says_what_was_trained(target, text, tmp_path):
    """A whole model by its own config, whose head has the lens in it."""
    distill(target, text, tmp_path, recipe(layers=(0, 2)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
    assert config["tie_word_embeddings"] is False
    frozen = FrozenTarget(target)
    model = DraftModel(frozen, (0, 2))
    model.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["head"])
    written = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        want = model(tokens) @ frozen.lm_head.T
        have = written(tokens).logits
    assert float((have - want).abs().max()) < 0.05 * float(want.abs().max())  # written in bfloat16
    assert len(load_file(tmp_path / "model.safetensors")) == 2 * 9 + 3


def test_a_killed_run_goes_on_to_the_same_model(target, text, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    distill(target, text, whole, recipe(), log_every=2, save_every=0)

    def kill(step):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(target, text, broken, recipe(), log_every=2, save_every=0, on_step=kill)
    assert not (broken / "config.json").exists()  # not yet a model
    distill(target, text, broken, recipe(), log_every=2, save_every=0)
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(tensor, load_file(broken / "model.safetensors")[name]), name


def test_the_fit_is_not_made_twice(target, text, tmp_path, monkeypatch):
    fits = []

    def fit(*args):
        fits.append(args)
        fit_lens(*args)

    def kill(step):
        raise KeyboardInterrupt

    monkeypatch.setattr(draft_distill, "fit_lens", fit)
    with pytest.raises(KeyboardInterrupt):
        distill(target, text, tmp_path, recipe(), on_step=kill)
    distill(target, text, tmp_path, recipe())
    assert len(fits) == 1


def test_another_choice_of_layers_does_not_go_on_in_the_same_folder(target, text, tmp_path):
    distill(target, text, tmp_path, recipe(steps=1))
    with pytest.raises(ModelError, match="layers was"):
        distill(target, text, tmp_path, recipe(steps=1, layers=(0, 1)))


def test_rounds_of_a_chain_by_hand():
    """Tokens made count as an engine counts them: each round gives what was right and one more."""
    assert chain_rounds([], 3) == (0, 0)
    assert chain_rounds([False, False], 3) == (2, 2)
    assert chain_rounds([True, True, True, True, True], 3) == (2, 5)  # 3 + 1, then what is left
    assert chain_rounds([True, False, True, True, False, True], 2) == (3, 6)
    assert chain_rounds([True, False, True, True, False, True], 1) == (4, 6)


def test_a_perfect_draft_makes_whole_rounds(target):
    frozen = FrozenTarget(target)
    text = random_text(3)
    rows = frozen.greedy([[5, 9, 11], [8, 3, 4]], 24)
    text = type(text).from_rows(rows, [3, 3], [0, 0])
    found = tokens_per_round(DraftModel(frozen, range(4)), text)
    assert found == {"1": round(23 / 12, 4), "3": round(23 / 6, 4), "5": round(23 / 4, 4)}


def test_loss_of_a_batch_is_the_cross_entropy(target):
    frozen = FrozenTarget(target)
    model, batch = DraftModel(frozen, (0, 1)), Feed(random_text(4), frozen, 0).batch(128, [0, 1])
    loss, parts = batch_loss(model, frozen, batch)
    student = (model(batch.tokens).flatten(0, 1)[batch.targets] @ frozen.lm_head.T).log_softmax(-1)
    teacher = (batch.hidden.flatten(0, 1)[batch.targets] @ frozen.lm_head.T).softmax(-1)
    torch.testing.assert_close(loss, -(teacher * student).sum(-1).mean())
    assert parts.shape == (3, 1) and len(frozen.lm_head) == VOCAB


def test_layers_are_read_and_refused(target):
    assert read_layers("0,1,-1", target) == (0, 1, 3)
    with pytest.raises(ModelError, match="no list of layers"):
        read_layers("all", target)
    for layers in ((), (1, 0), (1, 1)):
        with pytest.raises(ModelError, match="ascending order"):
            DistillSettings(layers=layers, steps=1)
    with pytest.raises(ModelError, match="0 to 3"):
        DraftModel(FrozenTarget(target), (0, 4))
    with pytest.raises(ModelError, match="when training ends"):
        DistillSettings(layers=(0,))


def test_the_command_puts_it_into_the_cache(target, text, tmp_path, monkeypatch):
    from tools.models.cache import model_path
    from tools.models.cli import app

    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    words = ["distill-draft", target, "--text", text, "--layers", "0,-1", "--steps", 2, "--device", "cpu"]
    words += ["--tokens-per-batch", 256, "--fit-tokens", 100]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert "tokens per round" in done.output
    assert (
        json.loads((model_path(f"{target.name}-draft") / "config.json").read_text())["num_hidden_layers"] == 2
    )
    refused = CliRunner().invoke(app, [str(word) for word in words[:4] + ["--layers", "0"]])
    assert refused.exit_code == 1 and "when training ends" in refused.output
