"""Training: it learns, it resumes to the same numbers, it writes the files that the engines load."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.head_helpers import HIDDEN, random_text, tiny_target, write_folder
from tools.models.cache import ModelError
from tools.models.head_batches import Feed
from tools.models.head_model import FrozenTarget
from tools.models.head_train import Settings, learning_rate, train


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("text"), random_text(16, high=60))


def recipe(**changes):
    common = {"steps": 12, "passes": 3, "tokens_per_batch": 256, "warmup": 4, "learning_rate": 3e-3}
    return Settings(**{**common, "intermediate_size": 56, **changes})


def lines_of(folder):
    return (folder / "train.jsonl").read_text().splitlines()


def test_the_loss_falls(target, text, tmp_path):
    train(target, text, tmp_path, recipe(steps=24, learning_rate=1e-2), log_every=8)
    lines = [json.loads(line) for line in lines_of(tmp_path)]
    assert [line["step"] for line in lines] == [8, 16, 24]
    for k in range(3):
        assert lines[-1]["cross_entropy"][k] < lines[0]["cross_entropy"][k]
    assert lines[-1]["learning_rate"] < 1e-4


def test_the_head_is_written_under_the_layout_s_names(target, text, tmp_path):
    train(target, text, tmp_path, recipe(steps=2))
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    h = HIDDEN
    assert shapes == {
        "fc.weight": (h, 2 * h),
        "fc.bias": (h,),
        "layers.0.self_attn.q_proj.weight": (48, h),
        "layers.0.self_attn.k_proj.weight": (16, h),
        "layers.0.self_attn.v_proj.weight": (16, h),
        "layers.0.self_attn.o_proj.weight": (h, 48),
        "layers.0.post_attention_layernorm.weight": (h,),
        "layers.0.mlp.gate_proj.weight": (56, h),
        "layers.0.mlp.up_proj.weight": (56, h),
        "layers.0.mlp.down_proj.weight": (h, 56),
    }
    assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "model.safetensors").values())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert config["intermediate_size"] == 56 and config["torch_dtype"] == "bfloat16"
    card = json.loads((tmp_path / "training.json").read_text())
    assert card["settings"]["passes"] == 3 and card["totals"]["step"] == 2


def test_a_killed_run_goes_on_to_the_same_lines(target, text, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(target, text, whole, recipe(), log_every=2, save_every=0)

    def kill(step):
        if step == 7:  # one step after a log line and its checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, text, broken, recipe(), log_every=2, save_every=0, on_step=kill)
    assert len(lines_of(broken)) == 3
    train(target, text, broken, recipe(), log_every=2, save_every=0)
    assert lines_of(broken) == lines_of(whole)
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(tensor, load_file(broken / "model.safetensors")[name]), name


def test_lines_written_after_the_checkpoint_are_written_again(target, text, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(target, text, whole, recipe(), log_every=2, save_every=0)

    def kill(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, text, broken, recipe(), log_every=2, save_every=0, on_step=kill)
    with (broken / "train.jsonl").open("a") as file:
        file.write('{"step": 5, "half": ')
    train(target, text, broken, recipe(), log_every=2, save_every=0)
    assert lines_of(broken) == lines_of(whole)


def test_a_finished_run_stays_as_it_is(target, text, tmp_path):
    first = train(target, text, tmp_path, recipe(steps=3), log_every=2)
    lines = lines_of(tmp_path)
    assert [json.loads(line)["step"] for line in lines] == [2, 3]  # the last stretch is logged too
    again = train(target, text, tmp_path, recipe(steps=3), log_every=2)
    assert lines_of(tmp_path) == lines
    assert {**again, "seconds": 0} == {**first, "seconds": 0} and "agreement" in again


def test_another_recipe_does_not_go_on_in_the_same_folder(target, text, tmp_path):
    train(target, text, tmp_path, recipe(steps=2))
    with pytest.raises(ModelError, match="passes was 3 and is 2"):
        train(target, text, tmp_path, recipe(steps=2, passes=2))


def test_hidden_states_are_the_same_from_the_cache(target):
    text, frozen = random_text(8), FrozenTarget(target)
    cached, fresh = Feed(text, frozen, 2**30), Feed(text, frozen, 0)
    assert fresh.cache is None
    first = torch.tensor([1, 4, 6]).numpy()
    for numbers in (first, first[::-1].copy()):
        ours, theirs = cached.batch(128, numbers), fresh.batch(128, numbers)
        assert torch.equal(ours.targets, theirs.targets) and torch.equal(ours.depth, theirs.depth)
        torch.testing.assert_close(
            ours.hidden.flatten(0, 1)[ours.targets], theirs.hidden.flatten(0, 1)[theirs.targets]
        )


def test_targets_and_depths_belong_to_their_conversation(target):
    text = random_text(5)
    batch = Feed(text, FrozenTarget(target), 0).batch(128, torch.arange(5).numpy())
    columns = (batch.targets // 128, batch.targets % 128, batch.depth)
    seen = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [
        (row, j, j - int(text.prompt_lengths[row]) + 1)
        for row in range(5)
        for j in range(int(text.prompt_lengths[row]), int(text.lengths[row]) - 1)
    ]
    assert seen == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "when training ends"),
        ({"steps": None, "minutes": 0.0}, "when training ends"),
        ({"hidden_until": 0.0}, "hidden_until is 0.0"),
        ({"passes": 0}, "at least one"),
    ],
)
def test_bad_recipes_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        recipe(**changes)


def test_the_rate_warms_up_and_falls_to_zero():
    settings = recipe(learning_rate=1.0, warmup=10)
    assert learning_rate(settings, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(settings, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(settings, 500, 0.5) == pytest.approx(0.5)
    assert learning_rate(settings, 900, 1.0) == pytest.approx(0.0)
