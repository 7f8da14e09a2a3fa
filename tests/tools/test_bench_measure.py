"""What `fledge bench` measures, on tiny models: runs, steady rounds, graphs, floor, Hugging Face."""

import json
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch

from tests.contract.probe import Probe
from tools.bench import attention_programs, bench_plans, kernel_layers, kernels, measure, steady
from tools.bench.bench_plans import HF_MODES
from tools.bench.bench_process import run_job
from tools.bench.bench_results import load
from tools.bench.floor import ROWS, engine_dtype, measure_floor, weight_bytes
from tools.bench.hf import measure_hf
from tools.bench.measure import timed_run
from tools.bench.prompt_sets import PromptSet
from tools.bench.stages_door import resolve_stage
from tools.bench.steady import Steady

STAGE = resolve_stage("part4_worker")
WAVES = [[[5, 6, 7], [9, 8, 7, 6]], [[11, 12], [13, 14, 15]]]
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


@pytest.fixture(scope="module")
def flags(tiny_flags) -> dict:
    return tiny_flags | {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 8,
                         "disable_radix_cache": True}  # fmt: skip


@pytest.fixture(scope="module")
def plain(flags):
    own = {name: value for name, value in flags.items() if not name.startswith("speculative")}
    with STAGE.open(**own) as engine:
        yield engine


@pytest.fixture(scope="module")
def chain(flags):
    with STAGE.open(**flags, **CHAIN, speculative_algorithm="EAGLE") as engine:
        yield engine


def test_a_run_counts_what_the_engine_did(plain, chain) -> None:
    run, results = timed_run(plain, WAVES, 9, ignore_eos=True)
    info = plain.get_server_info()
    assert (run.requests, run.tokens, run.rounds) == (4, 36, 0)
    assert (run.steps, info["forward_ct_prefill"]) == (
        info["forward_ct_decode"],
        2,
    )  # a prefill for each wave
    assert 0 < run.prefill_seconds < run.seconds and run.tokens_per_round == 1.0
    assert run.step_seconds == pytest.approx((run.seconds - run.prefill_seconds) / 16)
    drafted, others = timed_run(chain, WAVES, 9, ignore_eos=True)
    assert [r["output_ids"] for r in others] == [r["output_ids"] for r in results]
    rounds = sum(result["meta_info"]["spec_verify_ct"] for result in others)
    assert drafted.rounds == rounds and drafted.tokens_per_round == pytest.approx((36 - 4) / rounds)
    assert drafted.steps == chain.get_server_info()["forward_ct_decode"] < 16
    assert not any(result["meta_info"]["cached_tokens"] for result in results + others)


def test_steady_rounds_leave_the_engine_as_it_was(plain, chain) -> None:
    for engine, parts in ((plain, {"target"}), (chain, {"target", "draft"})):
        expected, _ = timed_run(engine, WAVES[:1], 20, ignore_eos=True)
        found = steady.steady(engine, WAVES[0], 20)
        Probe(engine).check_idle()
        assert set(found.phases) == parts and found.batch == 2
        assert 0 < len(found.rounds) < expected.steps and len(found.device) == 1
        if engine is plain:
            # 19 steps without the last two, which are too near the end; of 17 the first four are left out.
            assert len(found.rounds) == 13
        assert found.device[0] == pytest.approx(sum(samples[0] for samples in found.phases.values()))
        assert 4 + 1 < found.context <= 4 + 20
        assert timed_run(engine, WAVES[:1], 20, ignore_eos=True)[0].tokens == expected.tokens


def test_host_time_is_what_a_round_takes_beyond_the_device() -> None:
    assert Steady(1, 9, [0.4, 0.2, 0.3], {}, [0.1, 0.2]).host == pytest.approx([0.15])
    # Rounds near the replays have as many keys to read as those; the others do not count.
    rounds = [0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.6, 0.7]
    assert Steady(1, 9, rounds, {}, [0.5]).host == pytest.approx([0.1, 0.2])
    assert Steady(1, 9, [0.2], {}, [0.3]).host == pytest.approx([-0.1])
    assert Steady(1, 9, [0.4], {}, []).host == []  # no graph was replayed: nobody knows


def test_graphs_are_found_where_they_are_replayed_and_timed_alone(chain, monkeypatch) -> None:
    clock, replayed = [0.0], []

    class Graph:
        def __init__(self, name: str, milliseconds: float):
            self.name, self.milliseconds = name, milliseconds

        def replay(self) -> None:
            replayed.append(self.name)
            clock[0] += self.milliseconds

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream) -> None:
            assert stream == "a stream"
            self.time = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end) -> float:
            return end.time - self.time

    for name, value in {
        "CUDAGraph": Graph, "Event": Event, "synchronize": lambda: None, "current_stream": lambda: "a stream",
        "stream": lambda stream: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    original, worker = Graph.replay, chain.scheduler.draft_worker
    graphs = {"draft": Graph("d", 2.0), "verify": Graph("v", 5.0)}
    for name, graph in graphs.items():
        method = getattr(worker, name)
        monkeypatch.setattr(
            worker, name, lambda *args, method=method, graph=graph: (graph.replay(), method(*args))[1]
        )

    def one_round() -> tuple[dict, list[float]]:
        replayed.clear()
        with steady._replays(chain) as parts:
            chain.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2, "temperature": 0})
            assert replayed == ["d", "v"]
            alone, together = parts()
        return dict(alone), together

    phases = {"draft": pytest.approx([0.002] * 5), "verify": pytest.approx([0.005] * 5)}
    assert one_round() == (phases, []), "the draft extend ran outside of any graph"
    monkeypatch.setattr(steady, "model_forwards", lambda engine: {})  # as if graphs had held all forwards
    assert one_round() == (phases, pytest.approx([0.007] * 5))
    assert Graph.replay is original and worker.draft.__name__ == "<lambda>"  # all wrappers are gone


def test_wrapping_twice_and_unwrapping() -> None:
    class Owner:
        def work(self) -> str:
            return "a"

    owner = Owner()
    spots = {"phase": [(owner, "work"), (owner, "no such method")]}
    with measure.wrap(spots, lambda phase, method: method() + "b"):
        with measure.wrap(spots, lambda phase, method: method() + "c"):
            assert owner.work() == "abc"
        assert owner.work() == "ab"
    assert vars(owner) == {} and owner.work() == "a"


@pytest.mark.slow
def test_a_process_says_every_number_as_a_line(tiny_flags) -> None:
    said: list[dict] = []
    sets = [
        asdict(PromptSet("questions", ["ab cd", "foo"], 12, True)),
        asdict(PromptSet("held-out", ["the ab", "xyz 12"], 9, False)),
    ]
    settings = {"new_tokens": None, "repeat": 3, "seconds": 60.0, "raw": True, "steady": True}
    flags = tiny_flags | CHAIN | {"speculative_algorithm": "EAGLE"}
    entry = {"name": "chain 3/1/4", "kind": "engine", "batches": [1, 4], "flags": flags}
    job = {"stage": str(STAGE.path), "sets": sets, **settings, "configurations": [entry]}
    run_job(job, lambda event, **more: said.append(json.loads(json.dumps({"event": event, **more}))))
    assert [(e["event"], e.get("set"), e.get("batch")) for e in said if e["event"] != "progress"] == [
        ("begin", None, None), ("cell", "questions", 1), ("steady", None, 1), ("cell", "questions", 4),
        ("steady", None, 4), ("cell", "held-out", 1), ("cell", "held-out", 4), ("end", None, None),
    ]  # fmt: skip
    cells = [event for event in said if event["event"] == "cell"]
    assert [cell["requests"] for cell in cells] == [[2] * 3, [4] * 3] * 2
    assert cells[0]["tokens"] == [24] * 3 and cells[1]["tokens"] == [48] * 3
    assert len(set(cells[0]["rounds"])) == 1 and said[-1]["error"] is None
    assert said[1]["server"]["attention_backend"] == "torch_native"


def test_a_cell_stops_when_its_time_is_over(plain, monkeypatch) -> None:
    from tools.bench import bench_process

    job = {"repeat": 9, "seconds": 0.0}
    assert len(bench_process._runs(job, plain, WAVES, 4, True)) == 1
    calls: list[tuple] = []
    real = bench_process.timed_run
    monkeypatch.setattr(
        bench_process, "timed_run", lambda engine, waves, *more: calls.append((len(waves), more[0])) or real(
            engine, waves, *more)
    )  # fmt: skip
    assert len(bench_process._runs(job | {"repeat": 2, "seconds": 60.0}, plain, WAVES, 9, True)) == 2
    assert calls == [(2, 4), (1, 9), (2, 9), (2, 9)]  # every prompt, one group in full, and the runs


def test_weights_that_a_forward_reads(zoo) -> None:
    from tests.contract.models import BASE, TIED

    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    found = weight_bytes(zoo.target(), zoo.head(), 2)
    assert found["lm_head"] == 2 * BASE.vocab * 64
    assert found["target"] == 2 * (2 * layer + 64) + found["lm_head"]  # embeddings are looked up, not read
    assert found["draft"] == 2 * (layer - 64 + 64 * 128 + 64) + found["lm_head"]
    assert weight_bytes(zoo.target(TIED), None, 4) == {
        "target": 4 * (2 * layer + 64 + TIED.vocab * 64), "lm_head": 4 * TIED.vocab * 64,
    }  # fmt: skip


def test_the_floor_of_this_machine(zoo, monkeypatch) -> None:
    from tools.bench import floor

    monkeypatch.setattr(floor, "SECONDS", 1e-4)
    found = measure_floor(str(zoo.target()), str(zoo.head()), "cpu", "auto")
    assert set(found) == {"weight_bytes", "copy_bytes_per_second", "layer_matmuls", "lm_head", "tiny_kernel"}
    assert set(found["layer_matmuls"]) == set(ROWS) and all(len(s) == 5 for s in found["lm_head"].values())
    assert min(found["copy_bytes_per_second"]) > 1e8
    assert engine_dtype({"torch_dtype": "bfloat16"}, "cuda", "auto") is torch.bfloat16
    assert engine_dtype({"torch_dtype": "bfloat16"}, "cpu", "auto") is torch.float32
    assert engine_dtype({}, "cpu", "float16") is torch.float16


@pytest.mark.parametrize("mode", HF_MODES)
def test_hugging_face_answers_every_question_to_its_length(zoo, mode, recwarn) -> None:
    found = measure_hf(str(zoo.target()), mode, ["ab cd", "foo"], True, 7, "cpu", "auto")
    assert (found["tokens"], found["requests"], found["batch"]) == (14, 2, 1) and found["seconds"] > 0


@pytest.mark.slow
def test_the_command_measures_with_a_process_of_its_own(fledge, tiny_options, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench_plans, "there_and_back", list)  # one process is slow enough for a test
    path = tmp_path / "r.json"
    words = ["bench", "part4_worker", "--config", "plain", "--batch", 8, "--set", "questions", "--repeat", 1]
    done = fledge(*words, "--max-new-tokens", 8, "--out", path, *tiny_options)
    assert done.exit_code == 0, done.output
    data = load(path)
    (process,) = data["processes"]
    assert (process["configuration"], process["turn"], len(process["cells"])) == ("plain", 1, 1)
    assert {"commit", "dirty", "device", "versions", "command", "how", "prompt_sets"} <= set(data)
    assert "\npart4_worker plain: loading\npart4_worker plain: questions, batch 8\n" in f"\n{done.stderr}"
    (row,) = data["summary"]
    assert row["batch"] == 8 and row["host_seconds"] is not None
    assert f"plain {8:>14} " in done.stdout and "x\nfloor" not in done.stdout
    # Nothing is left to do, so the same command only shows what is there.
    before = path.read_bytes()
    again = fledge(*words, "--max-new-tokens", 8, "--out", path, *tiny_options)
    assert (again.exit_code, again.stderr, path.read_bytes()) == (0, "", before)
    assert again.stdout == done.stdout
    shown = fledge("bench", "part4_worker", "--show", "--out", path)
    assert (shown.exit_code, shown.stdout) == (0, done.stdout)


def test_what_is_committed_is_shown_on_any_machine(fledge, tmp_path, monkeypatch) -> None:
    """Neither the backend that this machine would take nor one that it lacks has a say."""
    monkeypatch.setattr("tools.bench.bench.FOLDER", tmp_path)
    for stage, backend in (("part4_worker", "triton"), ("part4_worker", "flashinfer"), ("spec_v2", "triton")):
        data = {"format": "fledge-bench", "version": 1, "stage": f"{stage} {backend}", "processes": []}
        (tmp_path / f"{stage}-{backend}.json").write_text(json.dumps(data))
    both = fledge("bench", "part4_worker", "--show")
    assert both.exit_code == 0 and "part4_worker triton: " in both.stdout
    assert "part4_worker flashinfer: " in both.stdout and "spec_v2" not in both.stdout
    one = fledge("bench", "part4_worker", "--show", "--attention-backend", "triton")
    assert one.exit_code == 0 and "flashinfer" not in one.stdout and "part4_worker triton: " in one.stdout
    every = fledge("bench", "--stages", "all", "--show")  # stages of which there is nothing are left out
    assert every.exit_code == 0 and "spec_v2 triton: " in every.stdout
    none = fledge("bench", "spec_v2", "--show", "--attention-backend", "flashinfer")
    assert (none.exit_code, none.stdout) == (2, "")
    assert "`fledge bench spec_v2 --attention-backend flashinfer` on a machine with a GPU" in none.stderr


@pytest.mark.gpu
def test_the_floor_of_this_gpu(zoo) -> None:
    found = measure_floor(str(zoo.target()), str(zoo.head()), "cuda", "bfloat16")
    assert {"graph_launch_host", "read_8_integers"} <= set(found)
    assert min(found["copy_bytes_per_second"]) > 1e10


@pytest.mark.gpu
def test_steady_rounds_on_a_gpu_know_the_host_where_graphs_are_on(flags) -> None:
    own = {name: value for name, value in flags.items() if name != "device"}
    with STAGE.open(**own, **CHAIN, speculative_algorithm="EAGLE", device="cuda") as engine:
        found = steady.steady(engine, WAVES[0], 40)
        Probe(engine).check_idle()
        if engine.get_server_info()["is_on"]["cuda_graph"]:
            assert {"draft", "verify", "draft extend"} <= set(found.phases)
            # A GPU that others use as well may take longer alone than in a round, so host may be below zero.
            assert min(found.device) > 0 and max(found.host) < max(found.rounds)
        else:
            assert found.host == []


def test_the_table_of_kernels_has_the_plan_in_use_and_is_kept_row_by_row(tmp_path, monkeypatch) -> None:
    """The library and every candidate are timed once; a run that breaks off keeps what it has."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "Layers", lambda _, rows, device: rows)
    monkeypatch.setattr(kernels, "Bench", lambda device: None)
    monkeypatch.setattr(kernels, "provenance", lambda device: {"device": device})
    monkeypatch.setattr(kernels, "microseconds", lambda rows, _: 1 / 0 if rows == 2048 else float(rows))
    path = tmp_path / "kernels.json"
    with pytest.raises(ZeroDivisionError):  # without the library's time there is nothing to compare
        kernels.main(str(path), (1, 8, 64, 1024, 2048))
    rows = json.loads(path.read_text())["rows"]
    assert [row["rows"] for row in rows] == [1, 8, 64, 1024]
    for row in rows:
        plans = [tuple(plan.values()) for _, plan in row["plans_us"]]
        assert len(plans) == len(set(plans))
        if row["rows"] == 1024:
            assert row["in_use"] is None
        else:
            assert tuple(row["in_use"].values()) in plans and row["library_us"] == row["rows"]


def test_the_programs_of_attention_are_timed_for_every_batch_and_the_ones_in_use_are_back(
    monkeypatch,
) -> None:
    attention = pytest.importorskip("stages.part4_worker.kernels.triton.attention")
    in_use = attention._PROGRAMS

    def time(requests, bench) -> float:
        ((_, (warps, columns)),) = attention._PROGRAMS
        return warps if requests < 64 else columns - warps / 100

    monkeypatch.setattr(attention_programs, "Decoding", lambda _, requests, rows_each, device: requests)
    monkeypatch.setattr(attention_programs, "Bench", lambda device: None)
    monkeypatch.setattr(attention_programs, "microseconds", time)
    found = list(attention_programs.measure_attention())
    assert attention._PROGRAMS is in_use
    batches = [(row["requests"], row["rows_each"]) for row in found]
    assert len(set(batches)) == len(found) and {(1, 1), (64, 1), (128, 8)} <= set(batches)
    for row in found:
        assert row["programs_us"][0][1] == ((4, 64) if row["requests"] < 64 else (8, 64))
        assert row["in_use"] in [program for _, program in row["programs_us"]]
    assert {row["requests"]: row["in_use"] for row in found} == {
        1: (8, 128), 8: (8, 128), 32: (8, 128), 64: (4, 128), 128: (4, 64)
    }  # fmt: skip


def test_the_layers_with_attention_see_their_context_and_of_the_new_tokens_the_ones_before(
    monkeypatch,
) -> None:
    from stages.part4_worker.kernels import load_kernels

    monkeypatch.setitem(kernel_layers.MODEL, "num_hidden_layers", 2)
    layers = attention_programs.Decoding(load_kernels("native"), 3, 4, "cpu")
    q = torch.randn(12, 9, 64, dtype=layers.x.dtype)
    before, (keys, values) = layers.attend(0, q), layers.caches[0]
    values[layers.table[1, :7].long()] += 1  # context of the second request
    values[layers.table[2, 202].long()] += 1  # the third of its four new tokens
    changed = (layers.attend(0, q) != before).flatten(1).any(1).tolist()
    assert changed == [False] * 4 + [True] * 4 + [False, False, True, True]
    assert layers.run().isfinite().all() and keys.isfinite().all()
