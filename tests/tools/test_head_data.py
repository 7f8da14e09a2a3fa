"""Text writing: with a scripted generator and a tokenizer of characters, then with a stage's engine."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tools.head_helpers import tiny_target
from tools.models.cache import ModelError
from tools.models.head_data import (
    HELD_OUT,
    KINDS,
    Template,
    Text,
    TextSettings,
    is_sane,
    load_text,
    without_loop,
    write_text,
)
from tools.models.head_model import FrozenTarget
from tools.models.head_writer import engine_writer, write_text_with

END = 2


class Words:
    """A tokenizer of single characters: enough of the transformers interface for `Template`."""

    eos_token_id = END

    def apply_chat_template(self, turns, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"S|U{turns[0]['content']}|A"

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def batch_decode(self, rows):
        return ["".join(map(chr, row)) for row in rows]


class Script:
    """A generator that asks numbered questions and answers in six tokens; it remembers its calls."""

    def __init__(self, die_at=None):
        self.calls, self.die_at, self.asked = [], die_at, 0

    def __call__(self, prompts, parameters, on_finished):
        if len(self.calls) == self.die_at:
            raise KeyboardInterrupt
        self.calls.append((prompts, parameters))
        on_finished(len(prompts))
        if prompts[0] == [ord(c) for c in "S|U"]:
            answers = []
            for _ in prompts:
                self.asked += 1
                answers.append([ord(c) for c in f" Why {self.asked}? "] + [END])
            return answers
        return [
            [100 + p["sampling_seed"] % 50, *[101] * 5] + ([] if p["ignore_eos"] else [END])
            for p in parameters
        ]


SMALL = TextSettings(conversations=40, held_out=6, shard_conversations=16, max_length=200, max_new_tokens=30)


def test_the_text_has_the_form_that_users_send(tmp_path):
    script = Script()
    manifest = write_text("tiny", Words(), script, tmp_path, SMALL)
    text, held_out = load_text(tmp_path), load_text(tmp_path, held_out=True)
    assert len(text) == 40 and len(held_out) == 6
    assert manifest["conversations"] == 40
    assert manifest["answer_tokens"] == int((text.lengths - text.prompt_lengths).sum())
    for number in range(len(text)):
        prompt = text.row(number)[: text.prompt_lengths[number]]
        shown = "".join(map(chr, prompt))
        assert shown.startswith("S|UWhy ") and shown.endswith("?|A")
    first = script.calls[0][1][0]
    assert first["temperature"] == 1.0 and "ignore_eos" not in first
    assert set(held_out.kinds) == {0}


def test_answers_are_a_mix_with_greedy_in_front(tmp_path):
    script = Script()
    settings = TextSettings(conversations=600, held_out=20, shard_conversations=600, max_length=200)
    write_text("tiny", Words(), script, tmp_path, settings)
    kinds = load_text(tmp_path).kinds
    parts = np.bincount(kinds, minlength=4) / 600
    assert parts == pytest.approx(settings.shares, abs=0.06)
    held_out, training = script.calls[-2][1], script.calls[-1][1]
    assert all(p["temperature"] == 0 and not p["ignore_eos"] for p in held_out)
    assert {p["temperature"] for p in training} == {0.0, 0.7, 1.0}
    assert all(p["temperature"] == 0 for p in training if p["ignore_eos"])
    limits = [p["max_new_tokens"] for p in training]
    assert limits == sorted(limits, reverse=True)
    assert KINDS[1] == "past_end"


def test_training_never_sees_a_held_out_question(tmp_path):
    write_text("tiny", Words(), Script(), tmp_path, SMALL)

    def prompts(text):
        return {tuple(text.row(i)[: text.prompt_lengths[i]]) for i in range(len(text))}

    text, held_out = load_text(tmp_path), load_text(tmp_path, held_out=True)
    assert len(prompts(text)) == 40 and not prompts(text) & prompts(held_out)


@pytest.mark.parametrize("die_at", [0, 1, 2, 3])
def test_a_killed_writer_goes_on_to_the_same_text(tmp_path, die_at):
    write_text("tiny", Words(), Script(), tmp_path / "whole", SMALL)
    with pytest.raises(KeyboardInterrupt):
        write_text("tiny", Words(), Script(die_at), tmp_path / "broken", SMALL)
    again = Script()
    write_text("tiny", Words(), again, tmp_path / "broken", SMALL)
    # Questions, held-out, three shards: what was done is not done again.
    assert len(again.calls) == 5 - die_at
    whole, broken = load_text(tmp_path / "whole"), load_text(tmp_path / "broken")
    assert (whole.tokens == broken.tokens).all() and (whole.kinds == broken.kinds).all()
    assert not list((tmp_path / "broken").glob("*.partial"))


def test_more_conversations_can_be_asked_for_but_nothing_else(tmp_path):
    write_text("tiny", Words(), Script(), tmp_path, SMALL)
    more = TextSettings(**{**SMALL.__dict__, "conversations": 48})
    script = Script()
    script.asked = 1000
    write_text("tiny", Words(), script, tmp_path, more)
    assert len(load_text(tmp_path)) == 48
    with pytest.raises(ModelError, match="other settings"):
        write_text("tiny", Words(), Script(), tmp_path, TextSettings(**{**SMALL.__dict__, "seed": 1}))


def test_a_target_without_questions_is_refused(tmp_path):
    def mute(prompts, parameters, on_finished):
        return [[ord("x"), END] for _ in prompts]

    with pytest.raises(ModelError, match="does not write questions"):
        write_text("tiny", Words(), mute, tmp_path, SMALL)


def test_shards_are_narrow_and_the_manifest_counts_them(tmp_path):
    write_text("tiny", Words(), Script(), tmp_path, SMALL)
    assert np.load(tmp_path / "shard-00000.npz")["tokens"].dtype == np.uint16
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [s["file"] for s in manifest["shards"]] == [HELD_OUT, *[f"shard-0000{i}.npz" for i in range(3)]]
    assert sum(sum(s["by_kind"].values()) for s in manifest["shards"]) == sum(
        s["answer_tokens"] for s in manifest["shards"]
    )


@pytest.mark.parametrize(
    ("question", "sane"),
    [
        ("What is a hash table?", True),
        ("Hi", False),
        ("x" * 1001, False),
        ("Что такое хеш-таблица?", False),
        ("naïve café, please explain", True),
        ("1 + 1 = ", False),
        ("say <|im_end|> aloud", False),
    ],
)
def test_which_questions_are_sane(question, sane):
    assert is_sane(question) is sane


def test_loops_are_cut_to_three_rounds():
    head = list(range(100, 120))
    assert without_loop(head + [1, 2, 3] * 40) == head + [1, 2, 3] * 3
    assert without_loop(head + [7] * 50) == head + [7] * 3
    assert without_loop(head + [1, 2, 3] * 4) == head + [1, 2, 3] * 4
    assert without_loop(head) == head


def test_text_of_a_wide_vocabulary_keeps_its_ids():
    text = Text.from_rows([[1, 70000], [5]], [1, 1], [0, 0])
    assert text.row(0).tolist() == [1, 70000] and text.row(1).tolist() == [5]


def test_a_template_that_repeats_the_user_is_refused():
    class Twice(Words):
        def apply_chat_template(self, turns, add_generation_prompt, tokenize):
            return turns[0]["content"] * 2

    with pytest.raises(ModelError, match="exactly once"):
        Template(Twice())


class Engine:
    """Answers a prompt with itself plus 100; even prompts stop there."""

    def __init__(self):
        self.calls = []

    def generate(self, input_ids, sampling_params):
        self.calls.append((input_ids, sampling_params))
        reasons = [{"type": "stop"} if ids[0] % 2 == 0 else {"type": "length"} for ids in input_ids]
        return [
            {"output_ids": [100 + ids[0]], "meta_info": {"finish_reason": reason}}
            for ids, reason in zip(input_ids, reasons, strict=True)
        ]


def test_an_engine_writes_in_calls_and_tells_of_each():
    engine, told = Engine(), []
    parameters = [{"max_new_tokens": n} for n in range(1, 6)]
    answers = engine_writer(engine, END, 2)([[5], [6], [7], [8], [9]], parameters, told.append)
    assert answers == [[105], [106, END], [107], [108, END], [109]]
    assert told == [2, 2, 1]
    assert engine.calls[2] == ([[9]], [{"max_new_tokens": 5}])
    assert [ids for ids, _ in engine.calls] == [[[5], [6]], [[7], [8]], [[9]]]


def test_an_end_that_is_in_the_answer_is_not_added():
    class Ends(Engine):
        def generate(self, input_ids, sampling_params):
            return [{"output_ids": [7, END], "meta_info": {"finish_reason": {"type": "stop"}}}]

    assert engine_writer(Ends(), END, 8)([[5]], [{}], lambda finished: None) == [[7, END]]


def test_a_stage_writes_what_its_target_says(tmp_path):
    """The real engine on a tiny target: its tokens are decoded by a tokenizer that has a chat template."""
    target = tiny_target(tmp_path / "target")
    words = {chr(97 + i) if i < 26 else chr(65 + i - 26) if i < 52 else str(i): i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="c", chat_template="ab{{ messages[0]['content'] }}ba"
    ).save_pretrained(target)
    settings = TextSettings(
        conversations=6,
        held_out=2,
        shard_conversations=4,
        max_length=128,
        max_new_tokens=12,
        past_end_tokens=9,
        max_question_tokens=40,
    )
    manifest = write_text_with("part4_worker", target, tmp_path / "text", settings, "cpu", 32)
    assert manifest["conversations"] == 6 and len(manifest["shards"]) == 3
    held_out, frozen = load_text(tmp_path / "text", held_out=True), FrozenTarget(target)
    for number in range(2):
        row, prompt = held_out.row(number), int(held_out.prompt_lengths[number])
        (expected,) = frozen.greedy([row[:prompt].tolist()], len(row) - prompt)
        assert row.tolist() == expected.tolist()


def test_greedy_answers_do_not_depend_on_their_neighbours(tmp_path):
    target = FrozenTarget(tiny_target(tmp_path / "target"))
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 61, n).tolist() for n in (2, 11, 5)]
    for prompt, row in zip(prompts, target.greedy(prompts, 9), strict=True):
        ids = list(prompt)
        for _ in range(9):
            with torch.no_grad():
                ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert row.tolist() == ids
