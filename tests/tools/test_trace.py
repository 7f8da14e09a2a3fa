"""`fledge trace`: recordings agree with the engine's results, checks find what is wrong, the timeline."""

import copy
import json
import re
from contextlib import contextmanager

import pytest

from tests.contract.probe import Probe
from tools.bench.stages_door import BadInput, resolve_stage
from tools.bench.trace import split_of, timeline
from tools.bench.trace_format import load_trace, validate
from tools.bench.trace_idle import gaps, work_of
from tools.bench.trace_launches import LaunchRecorder
from tools.bench.trace_record import StepRecorder, record
from tools.bench.trace_trees import Growth, candidates_of, chosen, parents_of
from tools.docs.traces import line

PART4, SPEC_V2 = resolve_stage("part4_worker"), resolve_stage("spec_v2")
PROMPTS = [[5, 6, 7, 8], [40, 41], [9, 10, 11]]
SHAPES = {
    "plain": {},
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8},
    "pages": {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8,
              "page_size": 4},
    "graphs": {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8,
               "disable_cuda_graph": False, "cuda_graph_bs": [4]},
}  # fmt: skip


# Of the second stage a result comes one step late, unless its scheduler does not overlap.
ENGINES = [(stage, shape, {}) for stage in (PART4, SPEC_V2) for shape in SHAPES]
ENGINES.append((SPEC_V2, "tree", {"disable_overlap_schedule": True}))


@contextmanager
def watched(tiny_flags, shape: str, stage=PART4, **more):
    """An engine, and what watches its trees."""
    flags = dict(tiny_flags) | SHAPES[shape] | {"max_total_tokens": 2048, "max_running_requests": 4} | more
    if shape == "plain":
        del flags["speculative_draft_model_path"]
    else:
        flags["speculative_algorithm"] = "EAGLE"
    with Growth().watching(stage.package()) as growth, stage.open(**flags) as engine:
        yield engine, growth


def whole(recorded: dict) -> dict:
    return {"stage": "part4_worker", "engine": {}, "provenance": {}} | recorded


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: "-".join([p[0].name, p[1], *p[2]]))
def recorded(request, tiny_flags):
    """A recording of three requests and, apart from it, what the engine gives for them."""
    stage, shape, more = request.param
    with watched(tiny_flags, shape, stage, **more) as (engine, growth):
        trace = whole(record(engine, growth, PROMPTS, 14, ignore_eos=True))
        Probe(engine).check_idle()
        assert "step" not in vars(engine.scheduler)  # no wrapper stays
        engine.flush_cache()
        params = {"temperature": 0, "max_new_tokens": 14, "ignore_eos": True}
        results = engine.generate(input_ids=PROMPTS, sampling_params=params)
    return stage, shape, trace, results


@pytest.fixture(scope="module")
def tree(tiny_flags) -> dict:
    with watched(tiny_flags, "tree") as (engine, growth):
        return whole(record(engine, growth, PROMPTS, 14, ignore_eos=True))


def entries(trace: dict, kind: str) -> list[dict]:
    return [entry for step in trace["steps"] if step["kind"] == kind for entry in step["requests"]]


def test_a_recording_is_valid_and_is_what_the_engine_says(recorded) -> None:
    stage, shape, trace, results = recorded
    validate(trace)
    assert [request["output_ids"] for request in trace["requests"]] == [r["output_ids"] for r in results]
    assert json.loads(json.dumps(trace)) == trace
    rounds = entries(trace, "verify")
    if shape == "plain":
        assert not rounds and len(entries(trace, "decode")) == 3 * 13
        return
    assert not entries(trace, "decode")
    for number, result in enumerate(results):
        own = [entry for entry in rounds if entry["request"] == number]
        meta = result["meta_info"]
        assert len(own) == meta["spec_verify_ct"]
        assert trace["requests"][number]["tokens_per_round"] == meta["tokens_per_round"]
        correct = sum(min(len(entry["tokens"]), len(entry["path"]) - 1) for entry in own)
        assert correct == meta["spec_num_correct_drafts"]
    # Both outcomes occur, or the test shows little.
    lengths = {len(entry["path"]) for entry in rounds}
    assert 1 in lengths and len(lengths) > 2
    assert any(entry["path"] != list(range(len(entry["path"]))) for entry in rounds) or shape == "chain"


def test_every_phase_is_in_its_place(recorded) -> None:
    stage, shape, trace, _ = recorded
    works = {"prefill": ["forward"], "decode": ["forward"]}
    if shape != "plain":
        works = {"prefill": ["prefill", "draft prefill"], "verify": ["draft", "verify", "draft extend"]}
    for step in trace["steps"]:
        names = [phase["name"] for phase in step["phases"]]
        host = [name for name in names if name in ("launch", "process", "commit")]
        assert [name for name in names if name not in host] == works[step["kind"]]
        commit = ["commit"] if step["kind"] == "verify" else []
        assert host == (["launch", "process"] if stage is SPEC_V2 else commit)
    assert trace["clock"] == "host"
    for step in trace["steps"]:
        split, total = split_of(step), step["end_us"] - step["start_us"]
        assert not {"commit", "launch", "process"} & set(split)
        if stage is SPEC_V2:  # the work of a step may have begun while the result before was processed
            assert split["host"] >= 0 and sum(split.values()) >= total - 1
        else:
            assert split["host"] > 0 and sum(split.values()) == pytest.approx(total, abs=1)


def spans(trace: dict, phase: str) -> list[tuple[float, float]]:
    """Start and end of a phase in every step."""
    found = (p for step in trace["steps"] for p in step["phases"] if p["name"] == phase)
    return [(p["start_us"], p["end_us"]) for p in found]


def in_table(trace: dict) -> str:
    """All rounds as the site has them in words."""
    return "".join(f"| {' | '.join(line(e, s, trace))} |\n" for s in trace["steps"] for e in s["requests"])


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_is_launched_before_the_last_result_is_processed(tiny_flags, overlaps) -> None:
    """And the round that was launched for requests that had ended is there, and nobody's."""
    flags = {"disable_overlap_schedule": not overlaps}
    with watched(tiny_flags, "tree", SPEC_V2, **flags) as (engine, growth):
        trace = whole(record(engine, growth, PROMPTS, 14, ignore_eos=True))
        Probe(engine).check_idle()
    validate(trace)
    launches, results = spans(trace, "launch"), spans(trace, "process")
    assert len(launches) == len(results) == len(trace["steps"]) > 4
    for step, (result, later) in enumerate(zip(results, launches[1:], strict=False)):
        assert (later[1] <= result[0]) if overlaps else (result[1] <= later[0]), step
    assert [not step["requests"] for step in trace["steps"]].count(True) == int(overlaps)
    assert bool(trace["steps"][-1]["requests"]) is not overlaps
    assert [line.plain for line in timeline(trace, False)][-1].rstrip().endswith("late") is overlaps
    # Reserved are two rounds beyond S, or more where a page or a round before has taken more.
    rounds = entries(trace, "verify")
    assert "| 8 of those reserved, 1 kept |" in in_table(trace)
    assert all(entry["reserved"] >= entry["seq_len"] + 2 * 8 - (8 if overlaps else 0) for entry in rounds)


def test_a_late_round_of_one_request_is_not_told_of_the_others(tiny_flags) -> None:
    """Answers of three lengths: rows whose request has ended run once more, beside those that go on."""
    with watched(tiny_flags, "tree", SPEC_V2, max_running_requests=3) as (engine, growth):
        real = engine.generate

        def generate(**more):
            params = more.pop("sampling_params")
            lengths = [{**params, "max_new_tokens": count} for count in (4, 9, 14)]
            return real(**more, sampling_params=lengths)

        engine.generate = generate
        trace = whole(record(engine, growth, PROMPTS, 14, ignore_eos=True))
    validate(trace)
    assert [len(request["output_ids"]) for request in trace["requests"]] == [4, 9, 14]
    counts = [len(step["requests"]) for step in trace["steps"]]
    assert counts == sorted(counts, reverse=True) and {3, 1, 0} <= set(counts)


def test_a_plug_in_without_a_draft_model(plug_in, monkeypatch) -> None:
    """Its `draft` shows the tree. A method that shows none is refused, but for times and tokens."""
    with SPEC_V2.open(**plug_in, max_total_tokens=2048) as engine:
        trace = whole(record(engine, Growth(), PROMPTS, 14, ignore_eos=True))
        validate(trace)
        assert all(entry["parents"] == [-1, 0, 1, 2] for entry in entries(trace, "verify"))
        assert {"draft", "verify"} <= {phase["name"] for phase in trace["steps"][2]["phases"]}
        engine.flush_cache()
        worker = engine.scheduler.draft_worker
        hidden, shown = worker.draft, type(worker).forward_batch_generation
        monkeypatch.setattr(worker, "forward_batch_generation", lambda *args: shown(Renamed(worker), *args))

        class Renamed:
            """The worker, with another name for its `draft`."""

            def __init__(self, worker):
                self.__dict__ |= vars(worker) | {"draft": hidden}

            def __getattr__(self, name):
                return getattr(worker, name)

        with pytest.raises(BadInput, match="RepeatWorker shows no tree"):
            record(engine, Growth(), PROMPTS, 14, ignore_eos=True)
        engine.flush_cache()
        trace = whole(record(engine, Growth(), PROMPTS, 14, has_trees=False, ignore_eos=True))
    validate(trace)
    assert entries(trace, "verify") and not any("tree" in entry for entry in entries(trace, "verify"))


def test_slots_are_those_that_the_tokens_keep(recorded) -> None:
    stage, shape, trace, _ = recorded
    for entry in entries(trace, "verify"):
        kept = len(entry["tokens"])
        if shape == "pages" or stage is SPEC_V2:  # position fixes the slot, so the KV was moved
            assert entry["kept_slots"] == entry["slots"][:kept]
        if shape == "pages":
            assert all(slot % 4 == (entry["seq_len"] + i) % 4 for i, slot in enumerate(entry["slots"]))
        elif stage is PART4:
            assert entry["kept_slots"] == [entry["slots"][node] for node in entry["path"][:kept]]


def test_every_proposal_is_in_the_recording(recorded) -> None:
    stage, shape, trace, _ = recorded
    steps, topk, n = (
        SHAPES[shape].get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")
    )
    for entry in entries(trace, "verify"):
        found = entry["candidates"]
        assert len(found["tokens"]) == topk + (steps - 1) * topk**2 and len(found["nodes"]) == n
        assert found["parents"][:topk] == [-1] * topk
        assert len(set(found["parents"])) == 1 + (steps - 1) * topk  # the root and every beam
        # Slots that are reserved are the drafts' first, and then the tree's.
        assert len(entry["draft_slots"]) == (0 if stage is SPEC_V2 else topk * (steps - 1))
    for step in trace["steps"]:  # drafting gave its slots back, so verifying takes the same ones
        for drafted, verified in zip(slots_of(step, "draft_slots"), slots_of(step, "slots"), strict=False):
            assert drafted == verified or shape == "pages"


def slots_of(step: dict, name: str) -> list[int]:
    """The slots that a step took, in the order of the free list."""
    return [slot for entry in step["requests"] for slot in entry.get(name, ())]


def test_the_prefix_cache_is_recorded_when_it_changes(recorded) -> None:
    stage, shape, trace, results = recorded
    shown = [step["cache"] for step in trace["steps"] if "cache" in step]
    assert 1 < len(shown) < len(trace["steps"])
    last = shown[-1]
    cached = sum(len(edge["tokens"]) for edge in last)
    assert all(edge["users"] == 0 for edge in last)  # all requests have finished
    assert max(edge["users"] for edge in shown[0]) > 0
    # What is not cached is free: every slot has one owner.
    assert trace["steps"][-1]["free"] + cached == 2048
    first = trace["requests"][0]
    tokens = first["prompt_ids"] + first["output_ids"]
    run = next(edge for edge in last if edge["tokens"][: len(first["prompt_ids"])] == first["prompt_ids"])
    assert run["tokens"] == tokens[: len(run["tokens"])]
    assert run["next"] == (None if shape == "plain" else tokens[len(run["tokens"])])


def test_a_stage_without_trees_is_recorded_without_candidates(tiny_flags, monkeypatch) -> None:
    monkeypatch.setattr(Growth, "of", lambda self, draft_token: None)
    with watched(tiny_flags, "tree") as (engine, growth):
        trace = whole(record(engine, growth, PROMPTS[:1], 6, ignore_eos=True))
    validate(trace)
    assert not [entry for entry in entries(trace, "verify") if "candidates" in entry]


def test_a_stage_whose_drafts_are_a_chain_without_links(tiny_flags) -> None:
    flags = dict(tiny_flags) | SHAPES["chain"] | {"speculative_algorithm": "EAGLE"}
    part3 = resolve_stage("part3_scheduler")
    with Growth().watching(part3.package()) as growth, part3.open(**flags) as engine:
        trace = whole(record(engine, growth, PROMPTS[:2], 8, ignore_eos=True))
    validate(trace)
    rounds = entries(trace, "verify")
    assert rounds and all(entry["parents"] == [-1, 0, 1, 2] for entry in rounds)
    assert all(entry["draft_slots"] == [] and "candidates" not in entry for entry in rounds)


@pytest.mark.parametrize("name", ["part1_draft_model", "part2_cudagraph_dp"])
def test_a_stage_whose_scheduler_knows_of_no_draft(fledge, tiny_options, tmp_path, name) -> None:
    out, at = tmp_path / "t.json", tiny_options.index("--speculative-draft-model-path")
    plain = [*tiny_options[:at], *tiny_options[at + 2 :], "--speculative-algorithm", "none"]
    for options, kind in ((tiny_options, "verify"), (plain, "decode")):
        words = ["the ab", "--max-new-tokens", 6, "--ignore-eos", "--out", out]
        done = fledge("trace", name, *words, *options)
        assert done.exit_code == 0, done.output
        trace = load_trace(out)
        assert entries(trace, kind) and trace["steps"][0]["cache" if kind == "decode" else "free"]


def test_candidates_that_are_not_the_tree_s_are_refused() -> None:
    assert chosen([0.5, 0.25, 0.5, 0.25], 3) == [0, 1, 2]  # equal scores go to the lower number
    found = candidates_of([9, 1, 3], [0.6, 0.1, 0.5], [1, 2, 3], [-1], topk=3)
    assert found["nodes"] == [-1, 0, 2] and found["parents"] == [-1, -1, -1]
    with pytest.raises(RuntimeError, match="was not chosen from these candidates"):
        candidates_of([9, 1, 4], [0.6, 0.1, 0.5], [1, 2, 3], [-1], topk=3)


def test_a_request_that_ends_inside_a_run_is_cut_there(tiny_flags) -> None:
    with watched(tiny_flags, "tree") as (engine, growth):
        for length in range(5, 12):
            trace = whole(record(engine, growth, PROMPTS[:1], length, ignore_eos=True))
            validate(trace)
            engine.flush_cache()
            last = entries(trace, "verify")[-1]
            if len(last["tokens"]) < len(last["path"]):
                break
        else:
            pytest.fail("no answer ended inside a run")
        assert len(trace["requests"][0]["output_ids"]) == length


def test_a_prompt_in_chunks(tiny_flags) -> None:
    with watched(tiny_flags, "chain", chunked_prefill_size=8) as (engine, growth):
        trace = whole(record(engine, growth, [list(range(5, 25))], 4, ignore_eos=True))
    validate(trace)
    chunks = entries(trace, "prefill")
    assert [(chunk["cached"], chunk["seq_len"], len(chunk["tokens"])) for chunk in chunks] == [
        (0, 8, 0), (8, 16, 0), (16, 20, 1),
    ]  # fmt: skip


def test_a_tree_that_was_looked_up_has_no_more_nodes_than_were_found(tiny_flags) -> None:
    flags = {name: value for name, value in tiny_flags.items() if not name.startswith("speculative")}
    flags |= {"speculative_algorithm": "NGRAM", "max_total_tokens": 2048}
    prompts = [[5, 6, 7, 8] * 6, [40, 41]]
    with SPEC_V2.open(**flags) as engine:
        trace = whole(record(engine, Growth(), prompts, 20, ignore_eos=True))
    validate(trace)
    sizes = {len(entry["tree"]) for entry in entries(trace, "verify")}
    assert 1 in sizes and max(sizes) > 2
    assert all(len(entry["slots"]) == len(entry["tree"]) for entry in entries(trace, "verify"))


def test_parents_from_children_and_siblings() -> None:
    #      0
    #    1   3
    #   2 4
    assert parents_of([1, 2, -1, -1, -1], [-1, 3, 4, -1, -1]) == [-1, 0, 1, 0, 1]


# the checks


def first(trace: dict) -> dict:
    """The first round that accepted something."""
    rounds = entries(trace, "verify")
    return next(entry for entry in rounds if len(entry["path"]) > 1 and len(entry["tokens"]) > 1)


def swap_token(trace: dict) -> None:
    entry = first(trace)
    entry["tree"][entry["path"][1]] ^= 1


def other_root(trace: dict) -> None:
    first(trace)["tree"][0] ^= 1


def wrong_path(trace: dict) -> None:
    entry = first(trace)
    entry["parents"][entry["path"][1]] = -1


def orphan(trace: dict) -> None:
    entry = first(trace)
    entry["parents"][-1] = len(entry["parents"]) - 1


def lost_token(trace: dict) -> None:
    first(trace)["tokens"].pop()


def other_summary(trace: dict) -> None:
    trace["summary"]["idle_share"] += 0.01


def shared_slot(trace: dict) -> None:
    entry = first(trace)
    entry["slots"][1] = entry["slots"][0]


def foreign_slot(trace: dict) -> None:
    first(trace)["kept_slots"][0] += 1000


def stale_length(trace: dict) -> None:
    first(trace)["seq_len"] += 1


def no_text(trace: dict) -> None:
    del trace["pieces"][str(trace["requests"][0]["output_ids"][0])]


def back_in_time(trace: dict) -> None:
    trace["steps"][2]["start_us"] = trace["steps"][1]["end_us"] - 1


def phase_outside(trace: dict) -> None:
    trace["steps"][1]["phases"][-1]["end_us"] = trace["steps"][1]["end_us"] + 1


def new_version(trace: dict) -> None:
    trace["version"] = 2


def miscounted(trace: dict) -> None:
    trace["requests"][1]["spec_correct_drafts_histogram"][0] += 1


def no_parents(trace: dict) -> None:
    del first(trace)["parents"]


def other_node(trace: dict) -> None:
    nodes = first(trace)["candidates"]["nodes"]
    nodes[1], nodes[2] = nodes[2], nodes[1]


def better_left_out(trace: dict) -> None:
    found = first(trace)["candidates"]
    number = next(number for number in range(4, 36) if number not in found["nodes"])
    found["scores"][number] = found["scores"][found["parents"][number]]


def above_its_parent(trace: dict) -> None:
    first(trace)["candidates"]["scores"][-1] = 1.5


def stolen_slot(trace: dict) -> None:
    edges = next(step["cache"] for step in trace["steps"] if len(step.get("cache", ())) > 1)
    edges[1]["slots"][0] = edges[0]["slots"][0]


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (other_node, "the nodes are not the candidates that they name"),
        (better_left_out, "a better candidate was left out of the tree"),
        (above_its_parent, "is likelier than its parent"),
        (stolen_slot, "two entries of the prefix cache own one slot"),
        (swap_token, "the tokens are not those of the path"),
        (other_root, "the tree's root is not the last output token"),
        (wrong_path, "a node stands before its parent"),
        (orphan, "a node stands before its parent"),
        (lost_token, "kept slots are not those of the kept tokens"),
        (shared_slot, "two rows write to one slot"),
        (foreign_slot, "kept slots are not those of the kept tokens"),
        (stale_length, "is not what prompt and output give"),
        (no_text, "has no text in 'pieces'"),
        (back_in_time, "it does not follow the step before"),
        (phase_outside, "commit lies outside its place in time"),
        (new_version, "version 2, not fledge-trace version 1"),
        (other_summary, "its summary is not what its steps give"),
        (miscounted, "the engine counted something else"),
        (no_parents, "KeyError: 'parents'"),
    ],
)
def test_what_is_wrong_is_found(tree, harm, problem) -> None:
    broken = copy.deepcopy(tree)
    harm(broken)
    with pytest.raises(BadInput, match=re.escape(problem)):
        validate(broken)


def test_a_result_that_was_processed_inside_a_launch_is_refused(tiny_flags) -> None:
    with watched(tiny_flags, "chain", SPEC_V2) as (engine, growth):
        trace = whole(record(engine, growth, PROMPTS[:1], 14, ignore_eos=True))
    validate(trace)
    begins = {p["name"]: p for p in trace["steps"][3]["phases"]}["launch"]["start_us"]
    for phase in trace["steps"][2]["phases"]:
        if phase["name"] == "process":
            phase["start_us"] = begins
    with pytest.raises(BadInput, match="process of step 2 begins inside launch of step 3"):
        validate(trace)


@pytest.mark.parametrize(("stage", "kind"), [(PART4, StepRecorder), (SPEC_V2, LaunchRecorder)])
def test_on_a_gpu_a_phase_begins_with_its_graph(tiny_flags, fake_gpu, monkeypatch, stage, kind) -> None:
    """What the host does for it before is no work of the device's."""
    with watched(tiny_flags, "tree", stage) as (engine, growth):
        worker, graph = engine.scheduler.draft_worker, fake_gpu()
        method = worker.draft
        monkeypatch.setattr(worker, "draft", lambda *args: (graph.replay(), graph.replay(), method(*args))[2])
        recorder = kind(engine, growth)
        recorder.is_cuda = True
        with recorder.recording():
            params = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}
            engine.generate(input_ids=PROMPTS[:1], sampling_params=params, rid=["0"])
    steps = recorder.steps
    assert [step["kind"] for step in steps[:2]] == ["prefill", "verify"]
    for step in steps:
        took = {name: end - start for name, (start, end) in devices(step).items()}
        if step["kind"] == "prefill":
            assert took == {"prefill": 1e3, "draft prefill": 1e3}
        else:  # two graphs, and the event behind them
            assert took == {"draft": 21e3, "verify": 1e3, "draft extend": 1e3}
    # A millisecond before each phase, and one more before the draft's graph.
    assert {gap.round_us: gap.idle_us for gap in gaps(steps)} == {27e3: 4e3}


def devices(step: dict) -> dict[str, list[float]]:
    return {p["name"]: p["device_us"] for p in step["phases"] if p["device_us"] is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [PART4, SPEC_V2], ids=lambda stage: stage.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_phases_have_a_time_on_the_device(tiny_flags, stage, shape) -> None:
    with watched({**tiny_flags, "device": "cuda"}, shape, stage) as (engine, growth):
        trace = whole(record(engine, growth, PROMPTS, 14, ignore_eos=True))
    validate(trace)
    assert trace["summary"]["rounds"] > 0
    works = [work_of(step) for step in trace["steps"]]
    assert all(work and all(end > start for start, end in work) for work in works)
    order = [span for work in works for span in work]  # one stream, so one thing after the other
    assert all(a[1] <= b[0] for a, b in zip(order, order[1:], strict=False))
    for step in trace["steps"]:
        host = {"commit", "launch", "process"}
        assert all((phase["device_us"] is None) == (phase["name"] in host) for phase in step["phases"])
