"""What an EAGLE-3 head and a token map are made of: all of it arrives, or the start is refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.contract import models
from tests.contract.harness import run
from tests.contract.probe import Probe
from tests.contract.reference import Eagle3RefHead
from tests.contract.test_refusals import refused

SPEC, TREE = models.EAGLE3, (3, 2, 8)
pytestmark = pytest.mark.needs("eagle3", "token_map")


@pytest.fixture
def head(zoo):
    return models.read_tensors(zoo.head(SPEC)) | {"d2t": _offsets(SPEC.hot_tokens())}


@pytest.fixture
def start(engines, tmp_path):
    """start(tensors, **config): an engine with an EAGLE-3 head of these tensors."""

    def start(tensors, **config):
        folder = models.write_head(tmp_path / "head", SPEC, tensors, **config)
        return engines.fresh(SPEC, tree=TREE, speculative_draft_model_path=str(folder))

    return start


def _offsets(tokens: torch.Tensor) -> torch.Tensor:
    return tokens - torch.arange(len(tokens))


@pytest.mark.parametrize("name", ["t2d", "bias", "embedding", "t2d in numbers"])
def test_published_layouts_load(zoo, start, head, name):
    """Some have a bias in fc or a copy of the embedding, some lack t2d or keep it as whole numbers."""
    if name == "t2d":
        del head["t2d"]
    elif name == "bias":
        head["fc.bias"] = torch.randn(SPEC.hidden)
    elif name == "embedding":
        head["embed_tokens.weight"] = torch.full((SPEC.vocab, SPEC.hidden), float("nan"))
    else:
        head["t2d"] = head["t2d"].long()
    config = models._config(SPEC)
    with start(head) as engine:
        reference = Eagle3RefHead(config, head, zoo.ref(SPEC))
        prompts = zoo.prompts((5, 9), 8, SPEC)
        done = run(engine, prompts, {"max_new_tokens": 8}, ref_head=reference)
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=8) for p in prompts]


@pytest.mark.parametrize(
    "name", ["fc.weight", "d2t", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight",
             "midlayer.input_layernorm.weight", "midlayer.self_attn.q_proj.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_refused_by_name(start, head, name):
    del head[name]
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        start(head)


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_surplus_tensor_is_refused_by_name(start, head, name):
    head[name] = torch.ones(SPEC.hidden)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        start(head)


@pytest.mark.parametrize("how", ["absolute", "zeros", "beyond", "twice", "other"])
def test_a_map_that_leads_elsewhere_is_refused(start, head, how):
    """Ids instead of offsets, zeros that nobody filled, another vocabulary: all would draft nonsense."""
    tokens = SPEC.hot_tokens()
    if how == "absolute":
        head["d2t"] = tokens
    elif how == "zeros":
        head["d2t"] = torch.zeros_like(tokens)
    elif how == "beyond":
        head["d2t"] = _offsets(tokens) + (torch.arange(len(tokens)) == len(tokens) - 1) * SPEC.vocab
    elif how == "twice":
        head["d2t"] = _offsets(tokens) - (torch.arange(len(tokens)) == 5) * (tokens[5] - tokens[4])
    else:
        head["t2d"] = head["t2d"].roll(1)
    if how in ("beyond", "twice"):
        del head["t2d"]
    with pytest.raises(ValueError, match="d2t"):
        start(head)


@pytest.mark.parametrize(
    "config, word",
    [
        ({"draft_vocab_size": 95}, r"\[96\].*\[95\]"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "'EAGLE'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "three layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, "three layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(start, head, config, word):
    with pytest.raises(ValueError, match=word):
        start(head, **config)


def test_a_head_may_name_its_layers(zoo, start, head):
    """By their number among all: what layer i gives is what layer i + 1 is given."""
    ids = [0, 1, 4]
    with start(head, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}) as engine:
        fed, prompt = [], zoo.prompts((9,), 4, SPEC)[0]

        def see(args, kwargs, result):
            if args[0].forward_mode.is_extend():
                fed.append(args[0].spec_info.hidden_states.clone())

        probe = Probe(engine)
        with probe.spy(probe.draft_runner, "forward", see):
            run(engine, [prompt], {"max_new_tokens": 1})
    inputs = zoo.ref(SPEC).run(prompt).inputs
    torch.testing.assert_close(fed[0], torch.cat([inputs[i + 1] for i in ids], -1), atol=1e-4, rtol=1e-4)


def test_a_target_of_few_layers_is_refused(engines, zoo, tmp_path):
    few = models.TargetSpec(name="six", layers=6, algorithm="EAGLE3", hot=96, head_dim=32, seed=41)
    folder = models.write_head(tmp_path / "head", few, models.read_tensors(zoo.head(SPEC)))
    with pytest.raises(ValueError, match="three layers"):
        engines.fresh(few, tree=None, **_flags(folder))


def test_heads_of_the_other_kind_are_refused(engines, zoo):
    for spec, algorithm in ((models.EAGLE3, "EAGLE"), (models.BASE, "EAGLE3")):
        kept = models.EAGLE3.algorithm if spec is models.EAGLE3 else "EAGLE"
        flags = _flags(zoo.head(spec)) | {"speculative_algorithm": algorithm}
        with pytest.raises(ValueError, match=f"set it to {kept!r}"):
            engines.fresh(spec, tree=None, **flags)


def _flags(head) -> dict:
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}


def test_the_embedding_is_the_targets_own_and_the_head_is_not(engines):
    probe = Probe(engines.get(SPEC, tree=TREE))
    embed, head = probe.target_runner.model.get_embed_and_head()
    draft = probe.draft_runner.model
    assert draft.embed_tokens.data_ptr() == embed.data_ptr()
    assert draft.lm_head.shape == (96, SPEC.hidden) and draft.lm_head.data_ptr() != head.data_ptr()
    probe = Probe(engines.get(models.TOKEN_MAP, tree=TREE))
    embed, head = probe.target_runner.model.get_embed_and_head()
    assert probe.draft_runner.model.embed_tokens.data_ptr() == embed.data_ptr()
    assert torch.equal(probe.draft_runner.model.lm_head, head[models.TOKEN_MAP.hot_tokens()])


@pytest.mark.parametrize(
    "content", [[1, 2, 128], [3, 3], [-1, 4], [], [[1, 2]], [0.5, 1.0], {"a": 1}, "text", b"x"]
)
def test_a_token_map_that_is_none_is_refused(engines, tmp_path, content):
    file = tmp_path / "map.pt"
    torch.save(content, file) if content != b"x" else file.write_bytes(b"no such file format")
    with pytest.raises(ValueError, match="speculative_token_map"):
        engines.fresh(models.BASE, tree=TREE, speculative_token_map=str(file))


def test_more_children_than_draft_tokens_are_refused(engines, tmp_path):
    torch.save([5, 7, 9], tmp_path / "map.pt")
    with pytest.raises(ValueError, match="3 tokens of the draft's vocabulary"):
        engines.fresh(models.BASE, tree=(3, 4, 8), speculative_token_map=str(tmp_path / "map.pt"))
    with pytest.raises(ValueError, match="is no file"):
        engines.fresh(models.BASE, tree=TREE, speculative_token_map=str(tmp_path / "none.pt"))


def test_what_eagle3_does_not_take(stage, engines, zoo):
    flags = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "a-head"}
    message = refused(stage, flags | {"speculative_token_map": "map.pt"})
    assert "speculative_token_map" in message and "EAGLE3" in message
    with pytest.raises(ValueError, match="return_hidden_states"):
        engines.get(SPEC, tree=TREE).generate(input_ids=[[5, 6]], return_hidden_states=True)
