"""The embedded model and its head in float32: lossless, as many tokens per round as the simulation says,
exact KV.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.contract.harness import GAP, run
from tests.contract.probe import Probe
from tests.contract.reference import RefHead, RefTarget, simulate

pytestmark = pytest.mark.model
NEW = 48
CHAIN, TREE = (3, 1, 4), (3, 4, 8)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to cook.",
    "Translate 'good morning' into Spanish and German.",
    "What is 12 times 7? Show how you get there.",
    "Write a Python function that adds two numbers.",
    "Who wrote Hamlet, and what happens in it?",
)


@pytest.fixture(scope="module")
def real(target_path, head_path):
    """Prompts as a chat sends them and the two reference models."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target_path))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    target = RefTarget(target_path)
    return SimpleNamespace(
        paths=(str(target_path), str(head_path)),
        prompts=prompts,
        target=target,
        head=RefHead.read(head_path, target),
    )


def generate(stage, real, tree, prompts=None, check=False, **flags):
    """Run one engine over the prompts, float32, and shut it down."""
    target, head = real.paths
    more = {}
    if tree is not None:
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        more = dict(zip(names, tree, strict=True))
        more |= {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": head}
    with stage.Engine(
        model_path=target,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        max_total_tokens=2048,
        **more,
        **flags,
    ) as engine:
        return run(
            engine,
            prompts or real.prompts,
            {"max_new_tokens": NEW},
            check=check,
            ref_head=real.head if check else None,
        )


@pytest.fixture(scope="module")
def plain(stage, real):
    """Plain outputs; one reference pass over each finds the places where float32 itself can't decide."""
    done = generate(stage, real, None)
    gaps = []
    for prompt, out in zip(real.prompts, done.tokens, strict=True):
        real.target.remember(prompt + out)
        logits = real.target.run(prompt + out).logits[len(prompt) - 1 : -1]
        top = torch.topk(logits, 2).values
        gaps.append(float((top[:, 0] - top[:, 1]).min()))
    sure = [i for i, gap in enumerate(gaps) if gap > GAP]
    assert len(sure) >= 5, gaps
    return SimpleNamespace(tokens=done.tokens, sure=sure)


def test_plain_greedy_is_the_references(real, plain):
    """Every output token is the argmax of one pass, without a cache, over what came before it."""
    for i in plain.sure:
        prompt, out = real.prompts[i], plain.tokens[i]
        rows = real.target.run(prompt + out).logits[len(prompt) - 1 : -1]
        assert rows.argmax(-1).tolist() == out
        ends = len(out) == NEW or out[-1] in real.target.eos
        assert ends and not set(out[:-1]) & real.target.eos


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_lossless_and_as_fast_as_simulated(stage, real, plain, tree):
    done = generate(stage, real, tree)
    have, want, tokens = 0, 0, 0
    for i in plain.sure:
        assert done.tokens[i] == plain.tokens[i]
        tokens += len(done.tokens[i]) - 1
        have += len(done.rounds[i])
        want += len(simulate(real.head, real.prompts[i], plain.tokens[i], *tree))
    assert abs(tokens / have - tokens / want) <= 0.03
    assert tokens / have > 1.5, "a head that is hardly ever right was not loaded right"


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_draft_kv_of_the_real_head(stage, real, plain, tree):
    """INV-DRAFTKV after every step, with pages."""
    prompts = [real.prompts[i] for i in plain.sure[:2]]
    done = generate(stage, real, tree, prompts, check=True, page_size=16)
    assert done.tokens == [plain.tokens[i] for i in plain.sure[:2]]


def test_head_and_target_share_their_matrices(stage, real):
    """The head brings neither embedding nor LM head: 28 million numbers that exist once."""
    target, head = real.paths
    with stage.Engine(
        model_path=target,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=head,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        max_total_tokens=256,
    ) as engine:
        probe = Probe(engine)
        embed, lm_head = probe.target_runner.model.get_embed_and_head()
        assert probe.draft_runner.model.embed_tokens.data_ptr() == embed.data_ptr() == lm_head.data_ptr()
        assert probe.draft_runner.model.lm_head.data_ptr() == lm_head.data_ptr()
