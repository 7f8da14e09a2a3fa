"""Published heads: what is normalised, what is refused, and by which name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.tools.head_helpers import (
    HIDDEN,
    VOCAB,
    random_text,
    tiny_head,
    tiny_setting,
    tiny_target,
    write_folder,
)
from tools.models.cache import ModelError
from tools.models.head_convert import convert_head
from tools.models.head_model import load_head, save_head


@pytest.fixture
def published(tmp_path):
    """A head as it is published: a pickle with a copy of the embedding, and a config that says little."""
    head = tiny_head(tiny_target(tmp_path / "target"))
    tensors = {name: t.detach().half() for name, t in head.tensors().items()}
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN).half()
    source = tmp_path / "published"
    source.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 56, "head_dim": 16,
        "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "bias": True, "torch_dtype": "float16",
    }  # fmt: skip

    def write(tensors=tensors, **changes):
        torch.save(tensors, source / "pytorch_model.bin")
        (source / "config.json").write_text(json.dumps({**config, **changes}))
        return source

    write()
    return head, tensors, source, write


def test_a_pickle_becomes_a_folder_that_loads(published, tmp_path):
    head, tensors, source, _ = published
    out = convert_head(source, tmp_path / "out")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == head.tensors().keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config["tie_word_embeddings"] is False
    assert config["torch_dtype"] == "float16" and "bias" not in config
    assert load_head(out).config.fc_bias


def test_an_eagle3_head_becomes_a_folder_that_loads(tmp_path):
    """Its own LM head stays, its map is checked, and a t2d that it lacks is made."""
    _, head = tiny_setting(tmp_path / "target", "EAGLE3")
    tensors = {name: t.detach().half() for name, t in head.tensors().items()} | {"d2t": head.maps()["d2t"]}
    config = head.config.raw | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors | {"embed_tokens.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    out = convert_head(tmp_path, tmp_path / "out")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == {*tensors, "t2d"} and all(torch.equal(stored[n], t) for n, t in tensors.items())
    loaded = load_head(out)
    assert loaded.algorithm == "EAGLE3" and torch.equal(loaded.hot_token_id, head.hot_token_id)
    assert stored["t2d"].nonzero().squeeze(-1).tolist() == head.hot_token_id.tolist()
    torch.save(tensors | {"d2t": head.hot_token_id + 40}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="d2t"):
        convert_head(tmp_path, tmp_path / "other")


def test_names_with_a_prefix_and_safetensors_are_read_too(published, tmp_path):
    head, tensors, source, _ = published
    (source / "pytorch_model.bin").unlink()
    save_file({f"model.{name}": t for name, t in tensors.items()}, source / "model.safetensors")
    assert (
        load_file(convert_head(source, tmp_path / "out") / "model.safetensors").keys()
        == head.tensors().keys()
    )


def test_a_head_without_bias_keeps_having_none(published, tmp_path):
    """Contract case B118: a bias is there if and only if the file has one."""
    _, tensors, _, write = published
    source = write({name: t for name, t in tensors.items() if name != "fc.bias"}, bias=False)
    out = convert_head(source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["bias"] is False
    head = load_head(out)
    assert not head.config.fc_bias and "fc.bias" not in head.tensors()


def test_rope_comes_from_the_target_where_the_head_is_silent(published, tmp_path):
    _, _, source, _ = published
    target = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "rope_theta": 5e5}
    out = convert_head(source, tmp_path / "out", target)
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "missing layers.0.mlp.up_proj.weight"),
        (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}), "input_layernorm"),
        (lambda t: t.update({"fc.weight": torch.ones(HIDDEN, HIDDEN)}), "fc.weight in .* has shape"),
        (lambda t: t.update({"d2t": torch.zeros(5)}), "LlamaForCausalLMEagle3: missing"),
        (lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.zeros(5)}), "Eagle3: missing"),
    ],
)
def test_foreign_tensors_are_refused_by_name(published, tmp_path, change, message):
    _, tensors, _, write = published
    tensors = dict(tensors)
    change(tensors)
    with pytest.raises(ModelError, match=message):
        convert_head(write(tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3: missing"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_foreign_configs_are_refused(published, tmp_path, changes, message):
    *_, write = published
    with pytest.raises(ModelError, match=message):
        convert_head(write(**changes), tmp_path / "out")


def test_a_head_of_another_target_is_refused(published, tmp_path):
    _, _, source, _ = published
    with pytest.raises(ModelError, match="hidden_size is 48, its target's 64"):
        convert_head(source, tmp_path / "out", {"hidden_size": 64, "vocab_size": VOCAB})


class Trap:
    """Unpickling this would run code."""

    def __reduce__(self):
        return (print, ("ran",))


def test_a_pickle_with_code_in_it_runs_nothing(published, tmp_path, capsys):
    _, _, source, _ = published
    torch.save({"fc.weight": Trap()}, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not a file of plain tensors"):
        convert_head(source, tmp_path / "out")
    assert "ran" not in capsys.readouterr().out


def test_missing_files_are_told(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        convert_head(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither"):
        convert_head(tmp_path, tmp_path / "out")


@pytest.fixture
def run():
    import typer

    from tools.models.head_cli import register

    app = typer.Typer()
    register(app)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_the_commands_train_evaluate_and_convert(published, tmp_path, run):
    _, _, source, _ = published
    target = tmp_path / "target"
    text = write_folder(tmp_path / "text", random_text(12), random_text(3, seed=9))
    trained = run("train-head", target, tmp_path / "head", "--text", text, "--train-only", "--steps", 2,
                  "--tokens-per-batch", 512, "--passes", 2, "--device", "cpu")  # fmt: skip
    assert trained.exit_code == 0, trained.output
    evaluated = run("eval-head", target, tmp_path / "head", "--text", text, "--limit", 2, "--max-tokens", 12,
                    "--device", "cpu", "--out", tmp_path / "eval.json")  # fmt: skip
    assert evaluated.exit_code == 0, evaluated.output
    found = json.loads((tmp_path / "eval.json").read_text())
    shapes = [(row["steps"], row["topk"]) for row in found["held_out"]["shapes"]]
    assert shapes[:5] == [(n, 1) for n in range(1, 6)] and (3, 4) in shapes
    assert found["versions"]["torch"] == torch.__version__ and len(found["head_sha256"]) == 64
    assert run("convert-head", source, tmp_path / "out").exit_code == 0


def test_errors_are_sentences(tmp_path, run):
    result = run("train-head", "no-such-model", tmp_path / "out", "--steps", 1)
    assert result.exit_code == 1 and "no model named" in result.output
    target = tiny_target(tmp_path / "target")
    result = run("train-head", target, tmp_path / "out", "--train-only")
    assert result.exit_code == 1 and "when training ends" in result.output
    save_head(tiny_head(target), tmp_path / "head")
    result = run("eval-head", target, tmp_path / "head", "--device", "cpu")
    assert result.exit_code == 1 and "Nothing to measure on" in result.output
    result = run("eval-head", target, tmp_path / "head", "--shape", "3/1")
    assert result.exit_code == 1 and "'3/1' is no shape" in result.output
    result = run("eval-head", target, tmp_path / "head", "--engine", "part9")
    assert result.exit_code == 1 and "no stage 'part9'" in result.output
    result = run("train-head", target, tmp_path / "out", "--text-only", "--stage", "part9")
    assert result.exit_code == 1 and "no stage 'part9'" in result.output
    result = run("train-head", target, tmp_path / "out", "--text-only", "--device", "cpu")
    assert result.exit_code == 1 and "no tokenizer could be loaded" in result.output


def test_an_engine_that_disagrees_is_told(published, tmp_path, monkeypatch):
    from tools.models import head_report

    target = tmp_path / "target"
    save_head(tiny_head(target), tmp_path / "head")
    text = write_folder(tmp_path / "text", random_text(4), random_text(4, seed=9))
    opened = []

    class Engine:
        """Answers with a fixed run and claims one round for it: more than any head could give."""

        def __init__(self, **keywords):
            opened.append(keywords)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def generate(self, input_ids, sampling_params):
            answer = {"output_ids": list(range(5, 25)), "meta_info": {"spec_verify_ct": 1}}
            return [answer for _ in input_ids]

    found = head_report.evaluate(target, tmp_path / "head", text, limit=2, max_tokens=8, open_engine=Engine)
    assert [keywords["speculative_eagle_topk"] for keywords in opened] == [1, 4]
    assert all(row["engine"] == 19 and not row["agrees"] for row in found["engine"])
