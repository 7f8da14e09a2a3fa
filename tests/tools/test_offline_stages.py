"""The commands on stages whose speculation is a loop beside the scheduler."""

import pytest

from tools.bench.compare import compare_stage, failures
from tools.bench.stages_door import resolve_stage
from tools.bench.trace_format import load_trace

LOOPS = ["part1_draft_model", "part2_cudagraph_dp"]


@pytest.mark.parametrize("stage", LOOPS)
def test_run_shows_the_answer_in_one_piece(fledge, tiny_options, stage) -> None:
    done = fledge("run", stage, "--prompt", "the ab cd", "--max-new-tokens", 8, *tiny_options)
    assert done.exit_code == 0, done.output
    assert "chain 3/1/4" in done.stdout and "tokens per round" in done.stdout
    for phase in ("prefill", "draft", "verify", "draft extend", "commit"):
        assert f"{phase} " in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("stage", LOOPS)
def test_a_trace_has_every_round_of_the_loop(fledge, tiny_options, tmp_path, stage) -> None:
    file = tmp_path / "trace.json"
    done = fledge("trace", stage, "the ab cd", "xyz", "--max-new-tokens", 10, "--out", file, *tiny_options)
    assert done.exit_code == 0, done.output
    trace = load_trace(file)
    first, *rounds = trace["steps"]
    assert first["kind"] == "prefill" and {step["kind"] for step in rounds} == {"verify"}
    for number, request in enumerate(trace["requests"]):
        entries = [e for step in trace["steps"] for e in step["requests"] if e["request"] == number]
        assert sum((entry["tokens"] for entry in entries), []) == request["output_ids"]
        assert all(entry["parents"] == [-1, 0, 1, 2] for entry in entries[1:])


def test_rows_of_a_stage_are_held_against_the_first_stages(tiny_flags) -> None:
    """Plain decoding of each stage against the reference's, its chain against its own plain decoding."""
    rows = []
    for name in (LOOPS[0], "part3_scheduler"):
        reference = rows[0] if rows else None
        rows += compare_stage(
            resolve_stage(name), tiny_flags, ["the ab cd", "xyz"], 8, 1, raw=True, reference=reference
        )
    assert [row.label for row in rows] == ["plain", "chain 3/1/4"] * 2
    assert failures(rows) == [] and [row.identical() for row in rows] == ["yes"] * 4
    assert rows[1].simulated == pytest.approx(rows[1].tokens_per_round)
    wrong = rows[0]
    wrong.results = [{**result, "output_ids": [5] * 8} for result in wrong.results]
    (plain, *_) = compare_stage(
        resolve_stage(LOOPS[1]), tiny_flags, ["the ab cd", "xyz"], 8, 1, raw=True, reference=wrong
    )
    assert plain.verdict.kind == "no"
