"""Checkpoints: every tensor arrives where it belongs or the start is refused by name; draft
and target share.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.contract import models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import RefHead, RefTarget

needs_eagle = pytest.mark.needs("eagle")


@pytest.fixture
def head(zoo):
    return models.head_tensors(models.BASE, zoo.target())


@needs_eagle
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_fc_bias(stage, engines, zoo, tmp_path, bias, flag):
    """A bias iff config or, where it is silent, the file says so; a contradiction is refused."""
    tensors = models.head_tensors(models.BASE, zoo.target(), bias=bias)
    folder = models.write_head(
        tmp_path / "head", models.BASE, tensors, **({} if flag is None else {"bias": flag})
    )
    if flag is not None and flag != bias:
        with pytest.raises(ValueError, match=r"fc\.bias"):
            engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))
        return
    with engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder)) as engine:
        prompts = zoo.prompts((5, 9), 8)
        done = run(engine, prompts, {"max_new_tokens": 8}, ref_head=RefHead.read(folder, zoo.ref()))
        assert done.tokens == [zoo.r0(p, max_new_tokens=8) for p in prompts]


@needs_eagle
@pytest.mark.parametrize("name", [n for n in models.HEAD_TENSORS if n != "fc.bias"])
def test_a_missing_head_tensor_is_refused_by_name(stage, engines, tmp_path, head, name):
    del head[name]
    folder = models.write_head(tmp_path / "head", models.BASE, head)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@needs_eagle
@pytest.mark.parametrize(
    "name",
    [
        "layers.0.input_layernorm.weight",
        "layers.1.mlp.up_proj.weight",
        "norm.weight",
        "hidden_norm.weight",
        "layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_surplus_head_tensor_is_refused_by_name(stage, engines, tmp_path, head, name):
    """It means that the head was trained as another model than the one it would run as."""
    head[name] = torch.ones(models.BASE.hidden)
    folder = models.write_head(tmp_path / "head", models.BASE, head)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@needs_eagle
def test_a_head_tensor_of_another_shape_is_refused_by_name(stage, engines, tmp_path, head):
    head["fc.weight"] = head["fc.weight"][:, : models.BASE.hidden].contiguous()
    folder = models.write_head(tmp_path / "head", models.BASE, head)
    with pytest.raises(ValueError, match=r"fc\.weight"):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_target_tensors_are_checked_too(stage, engines, tmp_path, change):
    folder = models.write_target(tmp_path / "target", models.BASE)
    tensors = models.target_tensors(models.BASE)
    name = "model.layers.1.post_attention_layernorm.weight"
    if change == "missing":
        del tensors[name]
    else:
        name = "model.layers.0.self_attn.q_norm.weight"
        tensors[name] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        engines.fresh(model_path=str(folder))


@needs_eagle
@pytest.mark.parametrize(
    "other, word",
    [
        (models.TargetSpec(name="wide", hidden=96, seed=31), "hidden"),
        (models.TargetSpec(name="few", vocab=64, seed=32, tokenizer=False), "vocab"),
    ],
    ids=["hidden size", "vocabulary"],
)
def test_a_head_for_another_target_is_refused(stage, engines, zoo, other, word):
    with pytest.raises(ValueError, match=word):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(zoo.head(other)))


@needs_eagle
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM", "Qwen2ForCausalLMEagle"]
)
def test_a_head_of_another_kind_is_refused(stage, engines, tmp_path, head, architecture):
    folder = models.write_head(tmp_path / "head", models.BASE, head, architectures=[architecture])
    with pytest.raises(ValueError, match=architecture):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@needs_eagle
def test_an_eagle3_head_under_eagle_is_refused_at_load(stage, engines, tmp_path, head):
    """Features of three layers, two-wide attention input, its own norms: no part of it may be ignored in
    silence.
    """
    hidden = models.BASE.hidden
    head = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.items()}
    head |= {
        "fc.weight": torch.randn(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
    }
    folder = models.write_head(tmp_path / "head", models.BASE, head)
    with pytest.raises(ValueError):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@needs_eagle
@pytest.mark.parametrize("how", ["d2t", "lm_head", "config"])
def test_a_head_with_a_vocabulary_of_its_own_is_refused(stage, engines, tmp_path, head, how):
    """Draft ids that are not target ids need a map, and without one the drafts would be nonsense."""
    few, config = 32, {}
    if how == "config":
        config = {"vocab_size": few}
    elif how == "d2t":
        head["d2t"] = torch.zeros(few, dtype=torch.int64)
    if how != "d2t":
        head["lm_head.weight"] = torch.randn(few, models.BASE.hidden)
    folder = models.write_head(tmp_path / "head", models.BASE, head, **config)
    with pytest.raises(ValueError):
        engines.fresh(tree=stage.shape, speculative_draft_model_path=str(folder))


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "LlamaForCausalLMEagle"])
def test_other_targets_are_refused_by_name(stage, engines, zoo, tmp_path, architecture):
    folder = models.copy_with_config(zoo.target(), tmp_path / "target", architectures=[architecture])
    with pytest.raises(ValueError, match=architecture):
        engines.fresh(model_path=str(folder))


def test_folders_that_are_no_models(stage, engines, tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        engines.fresh(model_path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(models._config(models.BASE)))
    with pytest.raises(ValueError, match="safetensors"):
        engines.fresh(model_path=str(tmp_path))
    with pytest.raises(ValueError, match="nowhere"):
        engines.fresh(model_path="nowhere-to-be-found")


@needs_eagle
def test_no_parameter_keeps_its_initial_value(stage, engines, monkeypatch):
    """Every tensor that a model makes starts as NaN here; none may be left after loading."""
    for name in ("empty", "ones", "zeros"):
        real = getattr(torch, name)

        def poisoned(*args, _real=real, **kwargs):
            made = _real(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, poisoned)
    loader = stage.module("models.loader")
    made, real_load = [], loader.load_model

    def load(*args, **kwargs):
        made.append(real_load(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(stage.module("model_executor.model_runner"), "load_model", load)
    engines.fresh(tree=stage.shape).shutdown()
    assert len(made) == 2
    for model in made:
        names = dict(model.named_parameters()) | dict(model.named_buffers())
        assert names and not [name for name, tensor in names.items() if not torch.isfinite(tensor).all()]


@needs_eagle
def test_embedding_and_head_are_the_targets_own(stage, engines, zoo):
    """Same storage, for an untied and a tied target; no second copy stays alive."""
    for spec in (models.BASE, models.TIED):
        engine = engines.get(spec, tree=stage.shape)
        probe = Probe(engine)
        target, draft = probe.target_runner.model, probe.draft_runner.model
        embed, head = target.get_embed_and_head()
        assert draft.embed_tokens.data_ptr() == embed.data_ptr()
        assert draft.lm_head.data_ptr() == head.data_ptr()
        own = {p.data_ptr(): p.numel() for p in draft.parameters()}
        shared = {embed.data_ptr(), head.data_ptr()}
        assert sum(n for pointer, n in own.items() if pointer not in shared) < 40_000


@needs_eagle
@pytest.mark.parametrize("page", [1, 16])
def test_both_pools_have_the_slots_of_the_allocator(stage, engines, page):
    probe = Probe(engines.get(tree=stage.shape, page_size=page, max_total_tokens=1000))
    slots = probe.allocator.size + page
    for runner in (probe.target_runner, probe.draft_runner):
        pool = runner.token_to_kv_pool
        assert pool.k_buffer.shape[1] == pool.v_buffer.shape[1] == slots
        pool.k_buffer[:, slots - 1] = 0.0
    assert probe.allocator.size == 1000 // page * page


@needs_eagle
def test_the_pool_is_sized_for_both_models(stage, engines, monkeypatch):
    """Without max_total_tokens: weights, target KV and draft KV together stay inside the share of memory."""
    runner = stage.module("model_executor.model_runner")
    budget = 3_000_000
    monkeypatch.setattr(runner, "_memory", lambda device: (10 * budget, 10 * budget))  # a CPU lends a tenth
    for tree in (None, stage.shape):
        with engines.fresh(tree=tree, max_total_tokens=None, max_running_requests=64) as engine:
            probe = Probe(engine)
            runners = [probe.target_runner] + ([probe.draft_runner] if tree else [])
            used = sum(
                r.token_to_kv_pool.k_buffer.nbytes + r.token_to_kv_pool.v_buffer.nbytes for r in runners
            )
            assert 0.9 * budget <= used <= 1.01 * budget, tree_id(tree)


def test_more_than_the_memory_holds_is_refused(stage, engines, monkeypatch):
    """In a sentence that says how much there may be, before anything is allocated."""
    each = engines.get().scheduler.tp_worker.model_runner.kv_bytes_per_token()
    monkeypatch.setattr(stage.module("model_executor.model_runner"), "_memory", lambda device: (10**7, 10**7))
    fits = 10**7 // each
    with pytest.raises(ValueError, match=f"max_total_tokens={fits + 1} .* give at most {fits}$"):
        engines.fresh(max_total_tokens=fits + 1)
    with pytest.raises(ValueError, match="max_running_requests=100000 .* give at most"):
        engines.fresh(max_running_requests=100_000)
    engines.fresh(max_total_tokens=fits, max_running_requests=2).shutdown()


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize(
    "spec", [models.BASE, models.GROUP3, models.BIASED, models.SCALED_ROPE], ids=lambda spec: spec.name
)
def test_features_of_the_head_equal_the_reference(stage, engines, zoo, spec):
    """Golden numerics: no input norm, residual kept, no final norm. Prefill and draft extend alike."""
    engine = engines.get(spec, tree=stage.shape)
    compared = []
    prompt = zoo.prompts((9,), 12, spec=spec)[0]
    truth = zoo.r0(prompt, spec, max_new_tokens=24, ignore_eos=True)

    def after(probe):
        for batch in probe.batches():
            for row, _ in probe.rows_of(batch):
                count, hidden = probe.draft_feature(batch, row)
                _, _, features = zoo.ref_head(spec).teacher_forced([*prompt, *truth][:count])
                torch.testing.assert_close(hidden, features[-1], atol=1e-4, rtol=1e-4)
                compared.append(row)

    run(engine, [prompt], {"max_new_tokens": 12}, after=after)
    assert len(compared) >= 4


def test_half_precision_weights_run_in_float32_on_a_cpu(stage, engines, zoo, tmp_path):
    """dtype "auto": the output is that of the reference on the rounded weights."""
    folder = models.write_target(tmp_path / "half", models.BASE)
    tensors = {name: tensor.bfloat16() for name, tensor in models.target_tensors(models.BASE).items()}
    save_file(tensors, folder / "model.safetensors")
    ref = RefTarget(folder)
    prompt = zoo.prompts((9,), 12)[0]
    with engines.fresh(model_path=str(folder), dtype="auto") as engine:
        assert engine.get_server_info()["is_on"]["dtype"] == "float32"
        run(engine, [prompt], {"max_new_tokens": 12}, ref=ref)
