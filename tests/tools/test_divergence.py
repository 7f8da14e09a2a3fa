"""`fledge divergence`: the verdict on fabricated runs, the judge on real ones, the command."""

import math
import re

import pytest

from tests.contract.models import BASE
from tools.bench import divergence
from tools.bench.divergence import TOLERANCE, Verdict, first_divergence, judge, score_position, verdict
from tools.bench.stages_door import merge_flags, plain_flags, resolve_stage

PROMPT = "the ab cd"


def never(index: int) -> float:
    raise AssertionError("there is no token to score")


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_first_divergence(a: list[int], b: list[int], index: int | None) -> None:
    assert first_divergence(a, b) == first_divergence(b, a) == index


def test_equal_texts_are_yes_and_nothing_is_scored() -> None:
    assert verdict([1, 2, 3], [1, 2, 3], never, 1e-3) == Verdict("yes")
    assert str(Verdict("yes")) == "yes"


def test_a_gap_within_tolerance_is_rounding() -> None:
    asked = []
    found = verdict([1, 2, 3, 9], [1, 2, 4, 7], lambda index: asked.append(index) or 0.004, 2e-2)
    assert found == Verdict("rounding", 2, 0.004) and asked == [2]
    assert str(Verdict("rounding", 87, 0.004)) == "rounding (token 87, gap 0.004)"
    assert verdict([1], [2], lambda index: 2e-2, 2e-2).kind == "rounding"
    assert verdict([1], [2], lambda index: 0.0, 1e-3).kind == "rounding"  # a tie


def test_a_gap_beyond_tolerance_is_no() -> None:
    found = verdict([1, 2], [1, 3], lambda index: 0.021, 2e-2)
    assert found == Verdict("no", 1, 0.021)
    assert str(found) == "no (token 1, gap 0.021)"
    assert verdict([1], [2], lambda index: math.nan, 2e-2).kind == "no"
    assert verdict([1], [2], lambda index: math.inf, 2e-2).kind == "no"


def test_a_text_that_ends_sooner_is_no() -> None:
    found = verdict([1, 2, 3], [1, 2], never, 1.0)
    assert found == Verdict("no", 2, None) and str(found) == "no (token 2, one text ends)"
    assert verdict([1, 2], [1, 2, 3], never, 1.0).kind == "no"


def test_narrower_types_have_wider_tolerances() -> None:
    assert 1e-3 == TOLERANCE["float32"] < TOLERANCE["float16"] < TOLERANCE["bfloat16"] < 1


# on an engine


@pytest.fixture(scope="module")
def plain(tiny_flags):
    stage = resolve_stage("part4_worker")
    with stage.open(**plain_flags(merge_flags(stage, tiny_flags))) as engine:
        yield engine


def test_scores_are_the_models_own(plain, zoo) -> None:
    prefix = [5, 17, 60, 9]
    logprobs = zoo.ref(BASE).run(prefix).logits[-1].log_softmax(-1)
    values, ids = logprobs.topk(3)
    third = int(ids[2])
    scores = score_position(plain, prefix, [third, int(ids[0])])
    assert [token for _, token in scores.top] == ids[:2].tolist()
    assert [score for score, _ in scores.top] == pytest.approx(values[:2].tolist(), abs=1e-4)
    assert [token for _, token in scores.disputed] == [third, int(ids[0])]
    # The gap is the disputed token's, and not that of the two best.
    assert scores.gap == pytest.approx(float(values[0] - values[2]), abs=1e-4)


def test_the_judge_looks_where_the_texts_part(plain, zoo) -> None:
    prompt = [5, 17, 60, 9]
    text = zoo.r0(prompt, max_new_tokens=6)
    assert judge(plain, prompt, text, text).kind == "yes"
    other = [*text[:3], (text[3] + 1) % BASE.vocab, *text[4:]]
    logprobs = zoo.ref(BASE).run([*prompt, *text[:3]]).logits[-1].log_softmax(-1)
    found = judge(plain, prompt, text, other)
    assert (found.kind, found.token) == ("no", 3)
    assert found.gap == pytest.approx(float(logprobs[text[3]] - logprobs[other[3]]), abs=1e-4)


# the command


def test_identical_texts_are_yes_with_status_0(fledge, tiny_options) -> None:
    done = fledge("divergence", "part4_worker", "--prompt", PROMPT, "--max-new-tokens", 12, *tiny_options)
    assert done.exit_code == 0, done.output
    assert f"1 {PROMPT}: yes\n" in done.stdout
    assert "the same 12 tokens" in done.stdout
    assert "tree 3/4/8 against plain, float32 (rounding: a gap up to 0.001): yes 1\n" in done.stdout


def test_several_prompts_from_a_file(fledge, tiny_options, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("the ab\n\nxyz 12\n")
    done = fledge(
        "divergence", "part4_worker", "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 6,
        *tiny_options, "--speculative-eagle-topk", 1, "--speculative-num-steps", 2, "--page-size", 4,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 the ab: yes\n2 xyz 12: yes\n" in done.stdout
    assert "chain 2/1/3 against plain" in done.stdout and "): yes 2\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "kind", "status"), [([], "no", 1), (["--tolerance", "1000"], "rounding", 0)]
)
def test_another_text(fledge, tiny_options, monkeypatch, words: list[str], kind: str, status: int) -> None:
    """A speculative engine that is wrong at token 3, as far as the command can see."""
    generate, calls = divergence.generate, []

    def wrong(engine, *args, **kwargs):
        results = generate(engine, *args, **kwargs)
        calls.append(engine)
        if engine.scheduler.draft_worker is not None:
            ids = results[0]["output_ids"]
            ids[3] = 50 if ids[3] != 50 else 51
        return results

    monkeypatch.setattr(divergence, "generate", wrong)
    words = ["--prompt", PROMPT, "--max-new-tokens", "6", *words]
    done = fledge("divergence", "part4_worker", *words, *tiny_options)
    assert done.exit_code == status, done.output
    assert len(calls) == 2
    assert f"{PROMPT}: {kind} (token 3, gap " in done.stdout
    for label in ("both", "plain", "tree 3/4/8"):
        assert re.search(rf"^   {label} +'.+'$", done.stdout, re.MULTILINE), done.stdout
    assert "log probabilities of plain decoding here" in done.stdout
    assert f"): {kind} 1\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", "a", "--prompts", "f.txt"], "Give --prompt or --prompts, and not both."),
        (["--prompts", "none.txt"], "No prompts could be read from none.txt"),
        (["--speculative-num-draft-tokens", "65"], "speculative_num_draft_tokens=65"),
    ],
)
def test_bad_input_is_one_sentence(fledge, tiny_options, words: list[str], sentence: str) -> None:
    done = fledge("divergence", "part4_worker", *tiny_options, *words)
    assert done.exit_code == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.output


def test_without_speculation_there_is_nothing_to_compare(fledge) -> None:
    done = fledge("divergence", "part4_worker", "--speculative-algorithm", "none")
    assert done.exit_code == 2 and "without speculation" in done.stderr


@pytest.mark.model
def test_the_embedded_model_is_identical(fledge, target_path, head_path) -> None:
    words = ["--prompt", "List three tips for sleeping better.", "--max-new-tokens", 24]
    done = fledge("divergence", "part4_worker", *words)
    assert done.exit_code == 0, done.output
    assert ": yes\n" in done.stdout and "the same 24 tokens" in done.stdout
