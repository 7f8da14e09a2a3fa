"""What `fledge trace` shows of a recording: how idle a round is, the timeline, the command."""

import io
import re

import pytest
from rich.console import Console

from tools.bench.trace import show, summary, timeline
from tools.bench.trace_format import load_trace
from tools.bench.trace_idle import gaps, idle_summary
from tools.provenance import REPO

# how idle a round is


def step_of(kind: str, requests: int, *spans: tuple[str, float, float], on_device: bool = True) -> dict:
    phases = [
        {"name": name, "start_us": a - 5, "end_us": a - 4, "device_us": [a, b]}
        if on_device
        else {"name": name, "start_us": a, "end_us": b, "device_us": None}
        for name, a, b in spans
    ]
    return {"kind": kind, "requests": [{}] * requests, "phases": phases}


@pytest.mark.parametrize("on_device", [True, False])
def test_idle_is_what_no_phase_of_the_device_fills(on_device) -> None:
    host = ("process", 0.0, 1e6)  # the host's phases are not looked at
    steps = [
        step_of("prefill", 2, ("prefill", 0, 50), on_device=on_device),
        step_of("verify", 2, ("draft", 60, 70), ("verify", 70, 100), on_device=on_device),
        # 30 before the draft, 5 before the verification, which overlaps with the draft extend
        step_of("verify", 2, ("draft", 130, 140), ("verify", 145, 175), ("draft extend", 170, 180), host,
                on_device=on_device),
        # 10 and nothing
        step_of("verify", 2, host, ("draft", 190, 200), ("verify", 200, 220), on_device=on_device),
        step_of("verify", 1, ("draft", 500, 510), ("verify", 510, 520), on_device=on_device),  # one has ended
    ]  # fmt: skip
    assert gaps(steps) == [(80, 35), (40, 10)]
    assert idle_summary(steps) == {"rounds": 2, "round_us": 60, "idle_us": 22.5, "idle_share": 0.375}
    assert idle_summary(steps[:2]) is None


# the timeline


def test_the_timeline_has_a_line_for_each_step() -> None:
    def phase(name: str, start: float, end: float, device=None) -> dict:
        return {"name": name, "start_us": start, "end_us": end, "device_us": device}

    prefill = {"kind": "prefill", "start_us": 0, "end_us": 500}
    prefill |= {"phases": [phase("prefill", 0, 400, [9, 309])], "requests": [{"request": 0, "tokens": [7]}]}
    verify = {
        "kind": "verify", "start_us": 500, "end_us": 980,
        "phases": [phase("draft", 500, 510, [510, 630]), phase("verify", 510, 520, [630, 870]),
                   phase("draft extend", 520, 530, [870, 930]), phase("commit", 530, 980)],
        "requests": [{"request": 0, "tree": [7, 8, 9], "path": [0, 2], "tokens": [8, 10]}],
    }  # fmt: skip
    trace = {"clock": "device", "pieces": {"7": "a", "8": "b\n", "10": " c"}, "steps": [prefill, verify]}
    lines = [line.plain for line in timeline(trace, coloured=False)]
    # The longest round has 48 characters: 120, 240, 60 µs on the device and 60 µs that are the host's.
    assert lines == [
        f"   0    0.500 ms {'P' * 30}{'.' * 18} {'':>7}  a",
        f"   1    0.480 ms {'D' * 12}{'V' * 24}{'E' * 6}{'.' * 6} {'1/2':>7}  b\\n c",
    ]
    assert summary(trace) == [
        "1 rounds of 0.480 ms, 2.00 tokens each",
        "medians on the device: draft 120 µs, verify 240 µs, draft extend 60 µs, host 60 µs",
    ]
    out = io.StringIO()
    show(trace, Console(file=out, width=120, force_terminal=True, color_system="standard"))
    assert "\x1b[36m████████████\x1b[0m\x1b[33m" in out.getvalue() and "DDD" not in out.getvalue()


def test_the_command_records_prints_and_shows_again(fledge, tiny_options, tmp_path) -> None:
    path = tmp_path / "t.json"
    words = ["the ab", "foo", "--max-new-tokens", 10, "--ignore-eos", "--out", path]
    done = fledge("trace", "part4_worker", *words, *tiny_options)
    assert done.exit_code == 0, done.output
    trace = load_trace(path)
    assert [request["prompt"] for request in trace["requests"]] == ["the ab", "foo"]
    assert trace["engine"]["shape"] == "tree 3/4/8" and {"commit", "dirty"} <= set(trace["provenance"])
    assert max(map(len, path.read_text().splitlines())) < 140  # a file that can be read
    lines = done.stdout.splitlines()
    assert "D draft  V verify  E draft extend  . host" in lines[0]
    assert len([line for line in lines if " ms " in line and "DV" in re.sub(r"(.)\1+", r"\1", line)]) == len(
        [step for step in trace["steps"] if step["kind"] == "verify"]
    )
    again = fledge("trace", path)
    assert again.exit_code == 0 and again.stdout == done.stdout.replace(f"written to {path}\n", "")


@pytest.mark.parametrize("name", ["part4_worker", "spec_v2"])
def test_a_batch_is_timed_without_its_trees(fledge, tiny_options, tmp_path, name) -> None:
    path = tmp_path / "t.json"
    words = ["--batch", 5, "--max-new-tokens", 9, "--ignore-eos", "--out", path]
    done = fledge("trace", name, *words, *tiny_options)
    assert done.exit_code == 0, done.output
    trace = load_trace(path)
    assert trace["engine"]["flags"]["max_running_requests"] == len(trace["requests"]) == 5
    assert len({tuple(request["prompt_ids"]) for request in trace["requests"]}) == 5
    rounds = [entry for step in trace["steps"] if step["kind"] == "verify" for entry in step["requests"]]
    assert rounds and all(set(entry) == {"request", "seq_len", "path", "tokens"} for entry in rounds)
    assert all("cache" not in step for step in trace["steps"])
    idle = trace["summary"]
    assert 0 < idle["idle_share"] < 1 and idle["rounds"] > 0
    assert f"no phase runs for {idle['idle_share']:.1%}: medians " in done.stdout
    assert "prompts of its own" in fledge("trace", name, "a", *words).stderr


def test_bad_input_is_one_sentence(fledge, tiny_options, tmp_path) -> None:
    (tmp_path / "t.json").write_text("{}")
    for words, sentence in (
        (["part4_worker", "a", "--enable-dp-attention"], "no --enable-dp-attention here"),
        (["part4_worker"], "Give at least one prompt"),
        (["no_such_stage", "a"], "There is no stage"),
        ([tmp_path / "t.json"], "The trace is not valid: KeyError: 'format'."),
        ([tmp_path / "t.json", "a"], "give it alone to see it"),
    ):
        done = fledge("trace", *words)
        assert done.exit_code == 2 and sentence in done.stderr and "Traceback" not in done.output


def test_committed_traces_are_valid() -> None:
    for path in (REPO / "docs" / "data" / "traces").glob("*.json"):
        trace = load_trace(path)
        assert len(trace["provenance"]["commit"]) == 40 and trace["provenance"]["dirty"] is False
        assert "/tmp" not in path.read_text(encoding="utf-8")
