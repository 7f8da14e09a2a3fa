"""`fledge compare`: rows and their numbers, the simulation as a check, the table, exit status."""

import io
import math
import re
import threading

import pytest
from rich.console import Console

from tools.bench import compare, progress
from tools.bench.compare import Row, compare_stage, failures, notes, step_count, table_of
from tools.bench.configurations import CHAIN, TREE, contenders
from tools.bench.divergence import Verdict
from tools.bench.measure import Cost
from tools.bench.stages_door import PROMPTS, TREE_FLAGS, read_prompts, resolve_stage

TEXTS = ["the ab cd", "xyz 12 foo", "bar stop"]


def info(shape=None, dtype: str = "float32", device: str = "cpu") -> dict:
    found = {
        "speculative_algorithm": shape and "EAGLE", "device": device, "attention_backend": "torch_native",
        "is_on": {"dtype": dtype, "cuda_graph": False},
    }  # fmt: skip
    return found | dict(zip(TREE_FLAGS, shape or (None,) * 3, strict=True))


def row(label: str = "plain", shape=None, rounds: int = 0, **more) -> Row:
    """One of two answers of 9 tokens in 2 seconds; speculative ones in `rounds` rounds each."""
    meta = {"spec_verify_ct": rounds} if shape else {}
    results = [{"output_ids": list(range(9)), "meta_info": meta}] * 2
    cost = Cost(2.0, 9, 3 * rounds, {"target": 1.2} | ({"draft": 0.3} if shape else {}))
    values = {"results": results, "seconds": [2.0, 1.0, 3.0], "cost": cost} | more
    return Row("part4_worker", label, info(shape, values.pop("dtype", "float32")), **values)


def printed(rows: list[Row], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(table_of(rows))
    return out.getvalue()


# rows and tables, fabricated


def test_the_numbers_of_a_row() -> None:
    chain = row("chain 3/1/4", CHAIN, rounds=4)
    assert chain.tokens == 18
    assert chain.speeds == [9.0, 18.0, 6.0]
    assert chain.tokens_per_round == 16 / 8  # the prefill's token belongs to no round
    assert row().tokens_per_round == 1.0


def test_a_row_shows_its_worst_prompt() -> None:
    rounding, no = Verdict("rounding", 87, 0.004), Verdict("no", 3, 1.5)
    assert row(verdicts=[Verdict("yes")] * 2).identical() == "yes"
    assert row(verdicts=[Verdict("yes"), rounding]).identical() == "rounding (token 87, gap 0.004)"
    assert row(verdicts=[rounding, no, rounding]).identical() == "no (token 3, gap 1.500)"
    assert row(verdicts=[rounding, rounding, no, no]).identical() == "no (token 3, gap 1.500), 2 of 4"


def test_the_table_fits_a_narrow_terminal() -> None:
    chain = row("chain 3/1/4", CHAIN, 4, simulated=2.004, verdicts=[Verdict("yes")])
    tree = row("tree 3/4/8", TREE, 2, simulated=4.0, verdicts=[Verdict("rounding", 87, 0.004)])
    out = printed([row(), chain, tree])
    lines = [line.split() for line in out.splitlines()]
    assert ["plain", "9.0", "1.00", "1.00", "-", "0.500", "0.000", "60/0/40", "yes"] in lines
    assert ["chain", "3/1/4", "9.0", "1.00", "2.00", "2.00", "0.500", "0.667", "60/15/25", "yes"] in lines
    assert any(words[:3] == ["tree", "3/4/8", "9.0"] and "rounding" in words for words in lines)
    for found in [*(rows := [row(seconds=[0.001]), chain, tree]), *rows]:
        found.stage = "part2_cudagraph_dp"
    for text in (out, printed([*rows, row()])):  # the second has stages to name
        assert "identical" in text and "…" not in text and all(len(line) <= 80 for line in text.splitlines())


def test_speedups_are_against_plain_decoding_of_the_same_stage() -> None:
    other = [row(seconds=[1.0]), row("chain 3/1/4", CHAIN, 4, seconds=[0.5])]
    for found in other:
        found.stage = "part3_scheduler"
    out = printed([*other, row(seconds=[4.0]), row("tree 3/4/8", TREE, 2, seconds=[4.0])])
    assert [words[0] for line in out.splitlines() if len(words := line.split()) == 1][-2:] == [
        "part3_scheduler", "part4_worker",
    ]  # fmt: skip
    assert re.search(r"chain 3/1/4 +36\.0 +2\.00", out) and re.search(r"tree 3/4/8 +4\.5 +1\.00", out)


def test_what_makes_a_table_fail() -> None:
    good = row("chain 3/1/4", CHAIN, 4, simulated=2.029, verdicts=[Verdict("rounding", 1, 0.0001)])
    assert failures([row(), good]) == []
    (sentence,) = failures([row(), row("chain 3/1/4", CHAIN, 4, simulated=2.031)])
    assert "2.000 tokens per round, where the simulation on the same outputs has 2.031" in sentence
    # Half-precision drafts round as well, so there the simulation is no judge.
    assert failures([row("chain 3/1/4", CHAIN, 4, simulated=2.2, dtype="bfloat16")]) == []
    assert failures([row("chain 3/1/4", CHAIN, 4, simulated=None)]) == []
    (sentence,) = failures([row("tree 3/4/8", TREE, 4, verdicts=[Verdict("no", 0, 1.0)])])
    assert sentence.startswith("part4_worker, tree 3/4/8: the text is not plain decoding's")


def test_notes_are_honest_about_speed() -> None:
    on_cpu, on_gpu = row(), row()
    for is_on in (False, True):  # a CPU has the runner of the graphs and no graphs
        on_cpu.info["is_on"]["cuda_graph"] = is_on
        assert "slower here, as expected" in notes([on_cpu], 48, 2)[0]
    on_gpu.info["device"] = "cuda"
    assert "No CUDA graphs" in notes([on_gpu], 48, 2)[0]
    on_gpu.info["is_on"]["cuda_graph"] = True
    assert not any("No CUDA graphs" in line for line in notes([on_gpu], 48, 2))
    noisy, _, spread = notes([on_cpu, row("chain 3/1/4", CHAIN, 4, seconds=[2.0, 2.1])], 48, 3)[1:4]
    assert "Noisy: the runs of part4_worker, plain differ by more than 25%" in noisy
    assert "differ by up to 200%" in spread


def test_rows_follow_the_stage_and_the_flags() -> None:
    stage = resolve_stage("part4_worker")

    def shapes(given: dict) -> list:
        return [tuple(flags.get(name) for name in TREE_FLAGS) for flags in contenders(stage, given)]

    assert shapes({}) == [(None,) * 3, CHAIN, TREE]
    assert shapes({"page_size": 4}) == [(None,) * 3, CHAIN, TREE]
    assert shapes({"speculative_eagle_topk": 2}) == [(None,) * 3, (None, 2, None)]
    assert shapes({"speculative_algorithm": "none"}) == [(None,) * 3]
    plain, looked_up = contenders(
        resolve_stage("spec_v2"), {"speculative_algorithm": "ngram", "page_size": 4}
    )
    assert looked_up == plain | {"speculative_algorithm": "ngram"}
    assert len(read_prompts(PROMPTS)) == 8


# on tiny models


@pytest.fixture(scope="module")
def measured(tiny_flags) -> tuple[list[Row], list[str]]:
    said: list[str] = []
    rows = compare_stage(
        resolve_stage("part4_worker"), tiny_flags, TEXTS, 14, repeats=2, raw=True, advance=said.append
    )
    return rows, said


def test_rows_agree_with_plain_decoding_and_with_the_simulation(measured) -> None:
    rows, _ = measured
    assert [found.label for found in rows] == ["plain", "chain 3/1/4", "tree 3/4/8"]
    for found in rows[1:]:
        assert [v.kind for v in found.verdicts] == ["yes"] * 3
        assert found.simulated == pytest.approx(found.tokens_per_round, abs=1e-9)
        assert 1.2 < found.tokens_per_round < 4  # the tiny head is sometimes right and sometimes wrong
    assert failures(rows) == []


def test_forwards_are_counted_per_batch(measured) -> None:
    rows, _ = measured
    plain, *others = rows
    assert (plain.tokens, plain.cost.target_forwards, plain.cost.draft_forwards) == (42, 14, 0)
    for found in others:
        rounds = max(result["meta_info"]["spec_verify_ct"] for result in found.results)
        assert (found.cost.target_forwards, found.cost.draft_forwards) == (1 + rounds, 1 + 3 * rounds)
        assert all(not result["meta_info"]["cached_tokens"] for result in found.results)


def test_runs_alternate_after_a_warm_up(measured) -> None:
    rows, said = measured
    assert said == [
        *[f"part4_worker: loading engine {i} of 3" for i in (1, 2, 3)],
        *[f"{found.label}: warming up" for found in rows],
        *[f"{found.label}: run 1 of 2" for found in rows],
        *[f"{found.label}: run 2 of 2" for found in rows[::-1]],
        "simulating the rounds",
    ]
    assert len(said) == step_count(resolve_stage("part4_worker"), {}, repeats=2, on_gpu=False)
    assert all(len(found.seconds) == 2 for found in rows)


def test_the_command_prints_the_table(fledge, tiny_options) -> None:
    done = fledge(
        "compare", "part4_worker", "--num-prompts", 2, "--max-new-tokens", 6, "--repeats", 1, *tiny_options
    )
    assert done.exit_code == 0, done.output
    for label in ("plain", r"chain 3/1/4", r"tree 3/4/8"):
        assert re.search(rf"^ ?{label} .* yes *$", done.stdout, re.MULTILINE), done.stdout
    assert "2 prompts in one batch, 6 new tokens each" in done.stdout
    assert "Where to look next" in done.stdout and "\x1b" not in done.stdout
    assert "tree 3/4/8: run 1 of 1\n" in done.stderr and "stage" not in done.stderr
    assert "make site\n" in done.stdout


def test_each_stage_says_which_it_is(fledge, tiny_options) -> None:
    words = ["compare", "part1_draft_model", "part4_worker", "--num-prompts", 1, "--max-new-tokens", 4]
    done = fledge(*words, "--repeats", 1, *tiny_options, "--speculative-algorithm", "none")
    assert done.exit_code == 0, done.output
    assert "stage 1 of 2, part1_draft_model: loading engine 1 of 1\n" in done.stderr
    assert "stage 2 of 2, plain: run 1 of 1\n" in done.stderr


def test_a_long_step_is_not_silent(monkeypatch) -> None:
    """What is said is how long it has been; when the command ends, nobody is left to say it."""
    seconds, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(progress, "SILENCE", 0.001)
    monkeypatch.setattr(
        progress.typer, "echo", lambda text, err: seconds.set() if text == "    0 s" else None
    )
    with progress.progress(1) as advance:
        advance("a long one")
        assert seconds.wait(60)
    assert threading.active_count() == before


def test_a_wrong_table_fails(fledge, tiny_options, monkeypatch) -> None:
    monkeypatch.setattr(compare, "judge", lambda *args: Verdict("no", 3, 1.5))
    words = ["compare", "part4_worker", "--num-prompts", 1, "--max-new-tokens", 4, "--repeats", 1]
    done = fledge(*words, *tiny_options, "--speculative-num-steps", 2)
    assert done.exit_code == 1
    assert "the text is not plain decoding's" in done.stderr and "no (token 3" in done.stdout


def test_a_head_that_the_simulation_cannot_read_leaves_its_column_empty(tiny_flags, monkeypatch) -> None:
    from tools.models import head_model
    from tools.models.cache import ModelError

    def refuse(*args) -> None:
        raise ModelError("not a head")

    monkeypatch.setattr(head_model, "load_head", refuse)
    rows = compare_stage(resolve_stage("part4_worker"), tiny_flags, TEXTS[:1], 4, 1, raw=True)
    assert [found.simulated for found in rows] == [None] * 3 and failures(rows) == []


def test_bad_input_is_one_sentence(fledge, tiny_options) -> None:
    done = fledge("compare", "no_such_stage", *tiny_options)
    assert done.exit_code == 2 and "There is no stage 'no_such_stage'" in done.stderr
    done = fledge("compare", "part4_worker", *tiny_options, "--page-size", 3)
    assert done.exit_code == 2 and "page_size=3" in done.stderr and "Traceback" not in done.output


@pytest.mark.model
def test_the_embedded_head_does_what_the_simulation_says(target_path, head_path) -> None:
    prompts = read_prompts(PROMPTS)[:2]
    rows = compare_stage(resolve_stage("part4_worker"), {"device": "cpu"}, prompts, 16, repeats=1)
    assert failures(rows) == []
    assert [found.identical() for found in rows] == ["yes"] * 3
    for found in rows[1:]:
        assert math.isclose(found.tokens_per_round, found.simulated, abs_tol=0.03)
        assert found.tokens_per_round > 1.2
