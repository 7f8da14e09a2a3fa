"""Text as it streams: never half a character, never part of a stop, and the same however tokens cut it."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.part4_worker.managers.detokenizer import IncrementalDetokenizer, decode_batch

CORPUS = [
    "the quick brown fox stops at the END of the line",
    "naïve café 😀😀 日本語 STOP stop the rest",
    "a stop string may begin in one token and end in another",
] * 20


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE as GPT-2's, trained here."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="<|end|>", unk_token="<s>"
    )


@pytest.fixture(scope="module")
def byte_fallback_tokenizer():
    """A Llama-2 style vocabulary: words with a space mark, and a token for each byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "!"]
    bpe = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


def byte_ids(tokenizer, text):
    """One token per byte, so that every character is cut everywhere."""
    alphabet = dict(zip(_byte_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    return [tokenizer.convert_tokens_to_ids(alphabet[byte]) for byte in text.encode()]


def _byte_order():
    """GPT-2 keeps printable bytes and moves the others above 255 in order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return kept + [byte for byte in range(256) if byte not in kept]


def run(detokenizer, ids):
    """Feed ids until something matches; returns (matched, number of tokens taken, every streamed text)."""
    streamed = []
    for number, token_id in enumerate(ids, 1):
        matched = detokenizer.append(token_id)
        streamed.append(detokenizer.stream_text())
        if matched is not None:
            return matched, number, streamed
    return None, len(ids), streamed


def assert_grows(streamed, final):
    for shorter, longer in itertools.pairwise([*streamed, final]):
        assert longer.startswith(shorter)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_ids_give_what_decoding_them_at_once_gives(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=120))
    detokenizer = IncrementalDetokenizer(tokenizer)
    known = [token_id for token_id in ids if token_id < len(tokenizer)]
    _, _, streamed = run(detokenizer, ids)
    assert detokenizer.final_text() == tokenizer.decode(known, skip_special_tokens=True)
    assert_grows(streamed, detokenizer.final_text())


@pytest.mark.parametrize("kind", ["tokenizer", "byte_fallback_tokenizer"])
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_many_answers_at_once_read_as_each_alone(request, kind, data):
    """Also where the tokenizer is none of Rust's, which decodes one after the other."""
    tokenizer = request.getfixturevalue(kind)
    rows = data.draw(st.lists(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20), max_size=5))
    alone = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
    slow = SimpleNamespace(decode=tokenizer.decode)
    assert decode_batch(tokenizer, rows) == alone == decode_batch(slow, rows)


def test_no_incomplete_character_is_streamed(tokenizer):
    text = "café 😀 日本語!" * 5
    ids = byte_ids(tokenizer, text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    _, _, streamed = run(detokenizer, ids)
    assert "\ufffd" not in "".join(streamed)
    assert detokenizer.final_text() == text
    assert_grows(streamed, text)


def test_a_request_that_ends_inside_a_character_shows_so_at_the_end_only(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    _, _, streamed = run(detokenizer, byte_ids(tokenizer, "é😀")[:-1])
    assert streamed[-1] == "é"
    assert detokenizer.final_text() == "é\ufffd"


def test_bytes_with_fallback_wait_for_the_whole_character(byte_fallback_tokenizer):
    tokenizer = byte_fallback_tokenizer
    ids = [tokenizer.convert_tokens_to_ids("▁hello")]
    ids += [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in ("😀é" * 12).encode()]
    ids += [tokenizer.convert_tokens_to_ids(word) for word in ("▁world", "!", "▁hello") * 12]
    detokenizer = IncrementalDetokenizer(tokenizer)
    _, _, streamed = run(detokenizer, ids)
    assert detokenizer.final_text() == tokenizer.decode(ids) == "hello" + "😀é" * 12 + " world! hello" * 12
    assert "\ufffd" not in "".join(streamed)
    assert_grows(streamed, detokenizer.final_text())


@pytest.mark.parametrize("cut", ["tokens", "bytes"])
@pytest.mark.parametrize("trim", [True, False])
def test_a_stop_is_found_across_tokens_and_inside_one(tokenizer, cut, trim):
    text = "the quick brown STOP the rest"
    ids = tokenizer(text)["input_ids"] if cut == "tokens" else byte_ids(tokenizer, text)
    for stop in ("STOP", "k b", "uic", "n STOP t", "t"):
        detokenizer = IncrementalDetokenizer(tokenizer, (stop,), no_stop_trim=not trim)
        matched, taken, streamed = run(detokenizer, ids)
        assert matched == stop
        whole = tokenizer.decode(ids[:taken])
        assert stop in whole and stop not in tokenizer.decode(ids[: taken - 1])
        assert detokenizer.final_text() == (whole[: whole.index(stop)] if trim else whole)
        assert_grows(streamed, detokenizer.final_text())


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_streamed_text_never_shows_a_part_of_a_stop(tokenizer, data):
    letters = st.text("ab ", min_size=1, max_size=4)
    text = data.draw(st.text("ab ", min_size=1, max_size=40))
    stops = data.draw(st.lists(letters, min_size=1, max_size=3))
    detokenizer = IncrementalDetokenizer(tokenizer, tuple(stops))
    matched, taken, streamed = run(detokenizer, byte_ids(tokenizer, text))
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    if not ends:
        assert matched is None and detokenizer.final_text() == text
    else:
        assert taken == ends[0][0]  # one byte a token: the stop that is complete first
        assert detokenizer.final_text() == text[: ends[0][1]]
    assert_grows(streamed, detokenizer.final_text())


def test_the_match_that_begins_first_wins(tokenizer):
    ids = byte_ids(tokenizer, "xxabcd")
    detokenizer = IncrementalDetokenizer(tokenizer, ("cd", "bcd", "zz"), ("abcd",))
    assert run(detokenizer, ids)[:2] == ("abcd", 6)
    assert detokenizer.final_text() == "xx"
    detokenizer = IncrementalDetokenizer(tokenizer, ("cd", "bcd"))
    assert run(detokenizer, ids)[0] == "bcd"


def test_tokens_after_the_match_change_nothing(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, ("b",))
    ids = byte_ids(tokenizer, "abc")
    assert [detokenizer.append(token_id) for token_id in ids] == [None, "b", "b"]
    assert detokenizer.final_text() == "a"


@pytest.mark.parametrize(
    ("pattern", "text", "matched", "kept"),
    [
        (r"\d{3}", "ab12c345d", "345", "ab12c"),
        (r"[Ss]top\b", "no stopping, Stop!", "stop", "no "),
        (r"(?<=x)end", "end xend", "end", "end x"),
        (r"e+!", "he ee!", "ee!", "he "),
        (r"\n\n", "a\nb\n\nc", "\n\n", "a\nb"),
        (r" \bfoo", "a foo", " foo", "a"),
        (r"日本", "語日本語", "日本", "語"),
    ],
)
def test_regexes_are_found_and_held_back(tokenizer, pattern, text, matched, kept):
    detokenizer = IncrementalDetokenizer(tokenizer, (), (pattern,))
    found, _, streamed = run(detokenizer, byte_ids(tokenizer, text))
    assert found == matched
    assert detokenizer.final_text() == kept
    assert_grows(streamed, kept)


def test_what_might_become_a_regex_match_waits_and_is_shown_when_it_does_not(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, (), ("abc",))
    _, _, streamed = run(detokenizer, byte_ids(tokenizer, "xabab"))
    assert streamed == ["x", "x", "x", "xab", "xab"]
    assert detokenizer.final_text() == "xabab"


def test_special_tokens_are_not_shown_but_can_be_a_stop(tokenizer):
    ids = [
        tokenizer.bos_token_id,
        *byte_ids(tokenizer, "a"),
        tokenizer.eos_token_id,
        *byte_ids(tokenizer, "b"),
    ]
    detokenizer = IncrementalDetokenizer(tokenizer)
    run(detokenizer, ids)
    assert detokenizer.final_text() == "ab"
    detokenizer = IncrementalDetokenizer(tokenizer, ("<|end|>", "not a token"))
    assert run(detokenizer, ids)[:2] == ("<|end|>", 3)
    assert detokenizer.final_text() == "a"


def test_without_a_stop_nothing_is_decoded_until_the_text_is_read(tokenizer, monkeypatch):
    detokenizer = IncrementalDetokenizer(tokenizer)
    calls = []
    monkeypatch.setattr(detokenizer, "_decoded", lambda ids: calls.append(len(ids)) or tokenizer.decode(ids))
    for token_id in byte_ids(tokenizer, "abcdefg" * 20):
        detokenizer.append(token_id)
    assert calls == []
    assert detokenizer.final_text() == "abcdefg" * 20


@pytest.mark.parametrize("text", ["plain text, ", "😀", "\xff"])
def test_the_work_for_a_token_does_not_grow(tokenizer, monkeypatch, text):
    detokenizer = IncrementalDetokenizer(tokenizer, ("never seen",), ("nor [t]his",))
    calls = []
    decode = detokenizer._decoded
    monkeypatch.setattr(detokenizer, "_decoded", lambda ids: calls.append(len(ids)) or decode(ids))
    ids = byte_ids(tokenizer, text * 100)
    if text == "\xff":
        ids = ids[::2]  # the first byte of a character again and again: no character ever completes
    for token_id in ids:
        detokenizer.append(token_id)
        detokenizer.stream_text()
    assert max(calls) <= 20
    assert sum(calls) <= 20 * len(ids)
    assert detokenizer.final_text() == tokenizer.decode(ids)
