"""`fledge bench --against`: two engines in alternated pairs."""

import json
import statistics

import pytest

from tools.bench import bench_pairs
from tools.bench.bench_pairs import Side, pairs_path
from tools.bench.engine_flags import parse_engine
from tools.bench.measure import Run
from tools.bench.pairs_summary import bootstrap, lines_of, load_pairs, summarise_idle, summarise_pairs
from tools.bench.stages_door import DRAFTS, BadInput, resolve_stage

pytestmark = pytest.mark.slow

SPEC_V2 = resolve_stage("spec_v2")


def pair(mine: float, other: float, tokens: int = 100) -> dict:
    return {
        "first": 0, "seconds": [mine, other], "prefill_seconds": [0.1, 0.1], "requests": [10, 10],
        "tokens": [tokens, 100], "steps": [9, 9], "rounds": [30, 45],
    }  # fmt: skip


def test_the_ratio_is_that_of_speeds_pair_by_pair() -> None:
    """A machine that slows down between pairs slows both, and changes nothing."""
    found = summarise_pairs([pair(1.0, 2.0), pair(10.0, 20.0), pair(4.0, 6.0, tokens=200), pair(2.0, 2.2)])
    # 2, 2, 3 and 1.1: not what the medians of the speeds make, 38 over 27
    assert found["ratio"]["median"] == 2.0 and found["ratio"]["pairs"] == 4
    assert 1.1 <= found["ratio"]["low"] < 2 < found["ratio"]["high"] <= 3
    assert found["tokens_per_round"] == [3.0, 2.0]
    assert [s["max"] for s in found["tokens_per_second"]] == [100.0, 50.0]


def test_the_interval_holds_medians_of_resamples() -> None:
    samples = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 5.0]
    low, high = bootstrap(samples)
    # Order statistics 2 and 9 of ten enclose the median with 97.9 %, 3 and 8 with 89 %.
    assert 1.01 <= low <= 1.025 and 1.065 <= high <= 1.08, "one wild pair moves nothing"
    assert bootstrap(samples) == (low, high)
    assert bootstrap([1.5, 1.5]) == (1.5, 1.5)


def test_an_engine_in_words() -> None:
    words = "spec_v2 --speculative-algorithm EAGLE3 --page-size 4 --no-disable-cuda-graph --cuda-graph-bs 1,2"
    assert parse_engine(words) == ("spec_v2", None, {
        "speculative_algorithm": "EAGLE3", "page_size": 4, "disable_cuda_graph": False,
        "cuda_graph_bs": [1, 2],
    })  # fmt: skip
    assert parse_engine("spec_v2 --config plain") == ("spec_v2", "plain", {})
    for text in ("", "spec_v2 --frob", "spec_v2 --page-size x", 'spec_v2 "', "a b"):
        with pytest.raises(BadInput, match="is no stage with engine flags"):
            parse_engine(text)


def test_the_other_side_has_the_same_flags_unless_it_says_so() -> None:
    mine = Side(SPEC_V2, {"speculative_draft_model_path": "h", "page_size": 4, "device": "cpu"})
    assert mine.other("part4_worker --page-size 1").given == mine.given | {"page_size": 1}
    plain = mine.other("spec_v2 --speculative-algorithm none").flags((4,), 16)
    assert not [name for name in plain if name.startswith("speculative")] and plain["page_size"] == 4
    assert plain["max_running_requests"] == 4 and plain["max_total_tokens"] >= 4 * (1024 + 16)


def test_a_configuration_on_each_side(tmp_path) -> None:
    mine = Side(SPEC_V2, {"model_path": "m", "speculative_draft_model_path": "h"}, "ngram")
    assert mine.flags((1,), 16)["speculative_algorithm"] == "NGRAM"
    other = mine.other("spec_v2 --config plain")
    assert not [name for name in other.flags((1,), 16) if name.startswith("speculative")]
    same, own = mine.other("part4_worker"), mine.other("spec_v2 --speculative-algorithm EAGLE")
    assert (same.stage.name, same.config, own.config) == ("part4_worker", "ngram", None)
    assert pairs_path(tmp_path, (mine, other)).name == "spec_v2-ngram-over-spec_v2-plain.json"
    shape = mine.other("spec_v2 --config 3/1/4")
    assert pairs_path(tmp_path, (own, shape), idle=True).name == "spec_v2-over-spec_v2-3-1-4-idle.json"
    assert shape.flags((1,), 16)["speculative_draft_model_path"] == "h"  # which n-grams have no use for
    with pytest.raises(BadInput, match="give shapes as --config"):
        Side(SPEC_V2, {"speculative_num_steps": 2}, "chain").flags((1,), 16)


def idle_pair(mine: float, other: float, round_us: float = 1000) -> dict:
    return {"first": 0, "rounds": [9, 9], "idle_us": [mine, other], "round_us": [round_us, round_us + 300],
            "idle_share": [mine / round_us, other / (round_us + 300)]}  # fmt: skip


def test_what_of_the_idle_time_is_recovered() -> None:
    found = summarise_idle([idle_pair(30, 300), idle_pair(60, 200), idle_pair(400, 200), idle_pair(20, 400)])
    # 0.9, 0.7, -1 and 0.95: pair by pair, and longer idle is less than nothing
    assert found["recovered"]["median"] == pytest.approx(0.8) and found["recovered"]["pairs"] == 4
    assert found["idle_left"]["median"] == pytest.approx(0.045)
    assert [spread["median"] for spread in found["idle_us"]] == [45, 250]
    assert summarise_idle([idle_pair(5, 0)] * 2)["recovered"]["median"] == 0, "there was nothing to recover"


def test_idle_time_is_compared_of_rounds_that_do_the_same(fledge, tiny_options, tmp_path) -> None:
    path = tmp_path / "p.json"
    words = ["bench", "spec_v2", "--against", "part4_worker", "--idle", "--config", "chain", "--batch", 2]
    words += ["--pairs", 2, "--max-new-tokens", 9, *tiny_options]
    done = fledge(*words, "--out", path)
    assert done.exit_code == 0, done.output
    data = load_pairs(path)
    (cell,) = data["cells"]
    assert [side["config"] for side in data["sides"]] == ["chain", "chain"] and "recovered:" in data["how"][2]
    assert all(pair["rounds"][0] > 1 and pair["round_us"][1] > 0 for pair in cell["pairs"])
    assert cell["summary"]["recovered"] == pytest.approx(summarise_idle(cell["pairs"])["recovered"], rel=1e-3)
    assert lines_of(data)[1] in done.stdout and "of the idle time recovered in 2 pairs" in done.stdout
    other = ["--against", "part4_worker --config 2/1/3", "--out", tmp_path / "q.json"]
    bad = fledge(*words, *other)
    assert bad.exit_code == 2 and "these are of chain 3/1/4 and chain 2/1/3" in bad.stderr
    for flag in (["--idle"], ["--pairs", 2]):
        alone = fledge("bench", "spec_v2", *flag, *tiny_options)
        assert alone.exit_code == 2 and "name the other one with --against" in alone.stderr


def test_a_draft_that_is_not_there_is_missed_before_anything_is_opened(fledge, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    ways = {
        "standalone": ("`fledge models distill-draft", "makes one. There is no model"),
        "eagle3": ("The model", "has not been fetched yet"),
    }
    for config, (begin, more_words) in ways.items():
        for more in (["--against", "spec_v2 --config plain"], ["--out", tmp_path / "r.json"]):
            done = fledge("bench", "spec_v2", "--config", config, "--batch", 1, *more)
            assert done.exit_code == 2 and done.stderr.startswith(f"{config} needs a draft: {begin}"), (
                done.stderr
            )
            assert more_words in done.stderr and repr(DRAFTS[config]) in done.stderr
            assert "Traceback" not in done.output


def test_the_command_takes_turns(fledge, tiny_options, tmp_path, monkeypatch) -> None:
    path, order = tmp_path / "p.json", []
    real = bench_pairs.timed_run

    def noting(engine, groups, new_tokens, ignore_eos) -> tuple[Run, list]:
        order.append((type(engine).__module__.split(".")[1], len(groups), new_tokens))
        return real(engine, groups, new_tokens, ignore_eos)

    monkeypatch.setattr(bench_pairs, "timed_run", noting)
    words = ["bench", "spec_v2", "--against", "part4_worker", "--batch", 4, "--pairs", 3, "--out", path]
    words += ["--max-new-tokens", 9, *tiny_options]
    done = fledge(*words)
    assert done.exit_code == 0, done.output
    mine, other = "spec_v2", "part4_worker"
    warm_up = [(name, *what) for name in (mine, other) for what in ((2, 4), (1, 9))]
    assert order == [*warm_up, *((name, 2, 9) for name in (mine, other, other, mine, mine, other))]
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"commit", "dirty", "device", "versions", "command", "how"} <= set(data)
    assert [(side["stage"], side["shape"]) for side in data["sides"]] == [
        (mine, "tree 3/4/8"), (other, "tree 3/4/8"),
    ]  # fmt: skip
    assert [side["server"]["is_on"]["overlap_schedule"] for side in data["sides"]] == [True, False]
    assert all(len(side["sources_sha256"]) == 64 for side in data["sides"])
    (cell,) = data["cells"]
    assert (cell["set"], cell["batch"], len(cell["pairs"])) == ("questions", 4, 3)
    assert [found["first"] for found in cell["pairs"]] == [0, 1, 0]
    assert all(found["tokens"] == [72, 72] for found in cell["pairs"])
    ratios = [found["seconds"][1] / found["seconds"][0] for found in cell["pairs"]]
    assert cell["summary"]["ratio"]["median"] == pytest.approx(statistics.median(ratios), rel=1e-4)
    assert lines_of(data)[1] in done.stdout and "spec_v2 (EAGLE, tree 3/4/8) over part4_worker" in done.stdout
    again = fledge(*words)
    assert again.exit_code == 2 and "--fresh to throw its numbers away" in again.stderr
    bad = fledge(*words, "--config", "plain", "--config", "tree")
    assert bad.exit_code == 2 and "does nothing else" in bad.stderr
