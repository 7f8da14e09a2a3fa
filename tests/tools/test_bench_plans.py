"""`fledge bench`: what runs in which order, what is left out on a second run, prompts and their groups."""

import json
import subprocess
from dataclasses import asdict

import numpy as np
import pytest

from tests.tools.head_helpers import write_folder
from tests.tools.test_head_data import END, Words
from tools import json_files, provenance
from tools.bench import bench, held_out
from tools.bench.bench_plans import Asked, command_line, engine_plans, floor_plans, hf_plans, tune_plans
from tools.bench.bench_results import Results
from tools.bench.bench_summary import best_per_batch, summarise
from tools.bench.configurations import BATCHES, GRID, METHODS, canonical, name_of, read_shape, shape_of
from tools.bench.held_out import held_out_questions
from tools.bench.prompt_sets import load_sets, waves
from tools.bench.stages_door import resolve_stage
from tools.models.cache import ModelError
from tools.models.head_data import Template, Text
from tools.provenance import REPO

STAGE = resolve_stage("part4_worker")
QUESTIONS = (load_sets()["questions"],)
HEADER = {"stage": "part4_worker", "sources_sha256": "a" * 64}


def asked(tiny_flags, **more) -> Asked:
    return Asked(STAGE, tiny_flags, **{"batches": (1, 8), "sets": QUESTIONS} | more)


def results(tmp_path) -> Results:
    return Results(tmp_path / "results.json", HEADER)


def order(plans) -> list[tuple[str, int, list[int]]]:
    return [
        (entry["name"], plan.turn, entry["batches"]) for plan in plans for entry in plan.job["configurations"]
    ]


def cell(batch: int, prompts: str = "questions") -> dict:
    return {"event": "cell", "set": prompts, "batch": batch, "seconds": [1.0], "prefill_seconds": [0.1],
            "requests": [8], "tokens": [80], "steps": [20], "rounds": [36]}  # fmt: skip


def steady(batch: int) -> dict:
    return {"event": "steady", "batch": batch, "context": 40, "rounds": [0.01], "phases": {}, "device": []}


# plans


def test_two_processes_per_configuration_in_abba_order(tiny_flags, tmp_path) -> None:
    config = ["plain", "chain", "3/4/8"]
    assert order(engine_plans(asked(tiny_flags), results(tmp_path), config)) == [
        ("plain", 1, [1, 8]), ("chain 3/1/4", 1, [1, 8]), ("tree 3/4/8", 1, [1, 8]),
        ("tree 3/4/8", 2, [1, 8]), ("chain 3/1/4", 2, [1, 8]), ("plain", 2, [1, 8]),
    ]  # fmt: skip


def test_several_stages_take_turns(tiny_flags, tmp_path, monkeypatch) -> None:
    """There stage by stage and back again, each into its own file."""
    ran = []
    monkeypatch.setattr(bench, "run_plans", lambda plans, *more: ran.extend(plans) or [])
    files = [Results(tmp_path / f"{name}.json", HEADER | {"stage": name}) for name in ("one", "two")]
    targets = [(asked(tiny_flags), results) for results in files]
    assert bench.measure(targets, ["plain", "chain"]) == []
    assert [
        (results.data["stage"], plan.turn, plan.job["configurations"][0]["name"]) for plan, results in ran
    ] == [
        ("one", 1, "plain"), ("one", 1, "chain 3/1/4"), ("two", 1, "plain"), ("two", 1, "chain 3/1/4"),
        ("two", 2, "chain 3/1/4"), ("two", 2, "plain"), ("one", 2, "chain 3/1/4"), ("one", 2, "plain"),
    ]  # fmt: skip


def test_what_is_there_does_not_run_again(tiny_flags, tmp_path) -> None:
    found = results(tmp_path)
    done = found.begin({"kind": "engine", "configuration": "plain", "turn": 1})
    for event in (cell(1), steady(1), cell(8)):  # killed before batch 8's steady rounds
        found.take(done, event)
    found.take(found.begin({"kind": "engine", "configuration": "plain", "turn": 2}), cell(8))
    again = Results(found.path, HEADER)
    assert order(engine_plans(asked(tiny_flags), again, ["plain"])) == [
        ("plain", 1, [8]),
        ("plain", 2, [1, 8]),
    ]
    both = asked(tiny_flags, sets=tuple(load_sets().values()))
    assert order(engine_plans(both, again, ["plain"]))[0] == ("plain", 1, [1, 8])


def test_tuned_means_the_winner_of_each_batch(tiny_flags, tmp_path) -> None:
    found = results(tmp_path)
    found.data["tuned"] = {"1": "tree 5/4/8", "8": "chain 3/1/4", "32": "tree 5/4/8"}
    wanted = asked(tiny_flags, batches=(1, 8, 32))
    assert order(engine_plans(wanted, found, ["chain", "tuned"]))[:2] == [
        ("chain 3/1/4", 1, [1, 8, 32]), ("tree 5/4/8", 1, [1, 32]),
    ]  # fmt: skip
    assert order(engine_plans(wanted, found, ["tuned"]))[1] == ("chain 3/1/4", 1, [8])
    assert engine_plans(wanted, results(tmp_path / "other"), ["tuned"]) == []  # nothing was tuned yet


def test_the_grid_is_tried_in_one_process(tiny_flags, tmp_path) -> None:
    shapes = {name_of(shape) for shape in GRID}
    assert {"chain 1/1/2", "chain 2/1/3", "chain 3/1/4", "chain 4/1/5", "chain 5/1/6"} <= shapes
    assert {"tree 2/2/4", "tree 3/2/6", "tree 3/4/8", "tree 4/4/8", "tree 5/4/8", "tree 5/4/16"} <= shapes
    assert all(read_shape("/".join(map(str, shape))) == shape for shape in GRID)  # each can exist
    assert all(shape_of(name_of(shape)) == shape for shape in GRID) and shape_of("plain") is None
    found = results(tmp_path)
    tried = found.begin({"kind": "tune", "configuration": "chain 1/1/2", "turn": 1})
    found.take(tried, cell(1))
    (plan,) = tune_plans(asked(tiny_flags, repeat=9), found)
    assert order([plan])[:2] == [("chain 1/1/2", 1, [8]), ("chain 2/1/3", 1, [1, 8])]
    assert len(plan.job["configurations"]) == len(GRID) and plan.job["repeat"] == 2
    assert [entry["name"] for entry in plan.job["sets"]] == ["questions"]


def test_a_method_is_a_configuration(tiny_flags, tmp_path) -> None:
    """Under its name, with its own flags over the stage's, and never the best of the shapes."""
    wanted = asked(tiny_flags, batches=(1,))
    given = wanted.given | {"speculative_adaptive_config": "slots.json"}
    wanted = Asked(resolve_stage("spec_v2"), given, (1,), QUESTIONS)
    plans = engine_plans(wanted, results(tmp_path), ["adaptive", "ngram", "plain", "chain"])
    assert [name for name, *_ in order(plans)][:4] == ["adaptive", "ngram", "plain", "chain 3/1/4"]
    adaptive, *others = (plan.job["configurations"][0]["flags"] for plan in plans[:4])
    ngram = others[0]
    assert adaptive["speculative_adaptive_config"] == "slots.json"
    assert not any("speculative_adaptive_config" in flags for flags in others)
    assert adaptive["speculative_adaptive"] and adaptive["speculative_eagle_topk"] == 1
    assert adaptive["speculative_algorithm"] == "EAGLE"
    assert adaptive["speculative_draft_model_path"] == tiny_flags["speculative_draft_model_path"]
    assert ngram["speculative_algorithm"] == "NGRAM" and "speculative_draft_model_path" not in ngram
    assert all(canonical(name) == name for name in METHODS) and canonical("tree") == "tree 3/4/8"
    found = results(tmp_path)
    for name in ("ngram", "chain 3/1/4", "floor"):
        kind = "floor" if name == "floor" else "engine"
        process = found.begin({"kind": kind, "configuration": name, "turn": 1})
        found.take(process, cell(1) | {"seconds": [1.0 if name == "ngram" else 2.0]})
    assert best_per_batch(found.data, "engine") == {1: "chain 3/1/4"}
    found.data["processes"][-1]["result"] = {"weight_bytes": {"target": 8}, "copy_bytes_per_second": [2.0]}
    floors = {row["configuration"]: row["over_floor"] for row in summarise(found.data)}
    assert floors["chain 3/1/4"] and floors["ngram"] is None


def test_floor_and_hugging_face_run_once(tiny_flags, tmp_path) -> None:
    found = results(tmp_path)
    (floor,) = floor_plans(asked(tiny_flags), found)
    assert floor.job["configurations"][0]["arguments"]["head"] == tiny_flags["speculative_draft_model_path"]
    names = [plan.job["configurations"][0]["name"] for plan in hf_plans(asked(tiny_flags), found)]
    assert names == ["hf greedy", "hf prompt look-up"]
    found.take(
        found.begin({"kind": "floor", "configuration": "floor", "turn": 1}), {"event": "result", "a": 1}
    )
    assert floor_plans(asked(tiny_flags), found) == []


def test_an_engine_has_room_for_the_largest_batch_and_caches_nothing(tiny_flags) -> None:
    flags = asked(tiny_flags, batches=(1, 64)).flags("tree 2/2/4")
    assert (flags["max_running_requests"], flags["disable_radix_cache"]) == (64, True)
    assert flags["max_total_tokens"] >= 64 * 1024 and flags["speculative_num_draft_tokens"] == 4
    assert "speculative_algorithm" not in asked(tiny_flags).flags("plain")
    own = tiny_flags | {"max_running_requests": 5, "disable_radix_cache": False}
    flags = asked(own).flags("plain")
    assert flags == flags | {"max_running_requests": 5, "disable_radix_cache": False}


def test_the_command_is_kept_without_its_file() -> None:
    assert command_line(["bench", "--out", "/a/b.json", "--tune"]) == "fledge bench --tune"
    words = ["bench", "--batch", "1", "--against", "a --config b"]
    assert command_line(words) == "fledge bench --batch 1 --against 'a --config b'"


def test_defaults_follow_the_flags(tiny_flags) -> None:
    assert asked(tiny_flags).configurations() == ["plain", "chain", "tree", "tuned"]
    assert asked({"model_path": tiny_flags["model_path"]}).configurations() == ["plain"]
    assert BATCHES == (1, 8, 32, 64, 128)


def test_bad_input_is_one_sentence(fledge, tiny_options, tmp_path) -> None:
    words = ["bench", "part4_worker", *tiny_options, "--out", tmp_path / "r.json"]
    for more, sentence in (
        (["--speculative-eagle-topk", 2], "give shapes as --config steps/topk/tokens"),
        (["--enable-dp-attention"], "fledge bench looks into the engine's own process"),
        (["--set", "riddles"], "There is no prompt set 'riddles': give questions, held-out, code-edits."),
        (["--config", "3/1/9"], "'3/1/9' is no shape"),
        (["--config", "ngrams"], "There is no configuration 'ngrams': give one of plain, chain, tree, ngram"),
        (["--attention-backend", "flashinfer"], "flashinfer"),
        (["--stages", "all"], "'part4_worker' and --stages all: give one of them."),
    ):
        done = fledge(*words, *more)
        assert done.exit_code == 2 and sentence in done.stderr and "Traceback" not in done.output


# prompts


def test_the_sets_are_what_the_issues_ask_for() -> None:
    sets = load_sets()
    questions, held = sets["questions"], sets["held-out"]
    assert (len(questions.questions), questions.new_tokens, questions.ignore_eos) == (8, 256, True)
    assert (len(set(held.questions)), held.ignore_eos) == (64, False)
    assert not set(questions.questions) & set(held.questions)
    edits = sets["code-edits"]
    assert (len(edits.questions), edits.ignore_eos) == (8, False)
    assert all("whole" in prompt and 24 <= len(prompt.splitlines()) <= 60 for prompt in edits.questions)
    data = json.loads((REPO / edits.file).read_text(encoding="utf-8"))
    # Chosen by what comes back, not by how fast that is.
    taken = [t for t in data["tried"] if t["ended"] and t["given_back"] >= 0.95 * t["lines"]]
    assert [t for t in data["tried"] if t["taken"]] == taken and len(taken) == 8
    assert all(
        len(prompts.sha256) == 64 and prompts.file.startswith("tools/bench/") for prompts in sets.values()
    )


def test_waves_send_every_prompt_equally_often() -> None:
    assert waves("abcdefgh", 1) == [[letter] for letter in "abcdefgh"]
    assert waves("abcdefgh", 4) == [list("abcd"), list("efgh")]
    assert waves("abcdefgh", 16) == [list("abcdefgh") * 2]
    assert waves("abc", 2) == [["a", "b"], ["c", "a"]]


class Letters(Words):
    def decode(self, row) -> str:
        return self.batch_decode([row])[0]


def test_held_out_questions_ended_by_themselves_and_were_not_trained_on(tmp_path) -> None:
    template = Template(Letters())

    def text(*pairs: tuple[str, list[int]]) -> Text:
        prompts = template.prompts([question for question, _ in pairs])
        rows = [[*prompt, *answer] for prompt, (_, answer) in zip(prompts, pairs, strict=True)]
        return Text.from_rows(rows, [len(prompt) for prompt in prompts], [0] * len(pairs))

    ended, cut = [65, 66, END], [65, 66, 67]
    held = text(("one", ended), ("loop", cut), ("known", ended), ("two", ended), ("three", ended))
    folder = write_folder(tmp_path, text(("known", cut), ("oneself", ended)), held)
    assert held_out_questions(folder, template, 2) == ["one", "two"]
    with pytest.raises(ModelError, match="holds 3 questions"):
        held_out_questions(folder, template, 4)
    described = held_out.describe(folder, ["one"])
    assert set(described["text_sha256"]) == {"held-out.npz", "shard-00000.npz"}


# where numbers come from


def test_commit_and_dirty_flag(tmp_path, monkeypatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(provenance, "REPO", tmp_path)
    monkeypatch.delenv("FLEDGE_COMMIT", raising=False)
    assert provenance.commit_and_dirty() == (None, None)
    monkeypatch.setenv("FLEDGE_COMMIT", "0" * 40 + "-dirty")
    assert provenance.commit_and_dirty() == ("0" * 40, True)
    monkeypatch.setenv("FLEDGE_COMMIT", "main")
    assert provenance.commit_and_dirty() == (None, None)
    for folder in ("tools", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("a")
    git("init", "-q"), git("add", "-A"), git("commit", "-qm", "x")
    commit = git("rev-parse", "HEAD")
    assert provenance.commit_and_dirty() == (commit, False)
    (tmp_path / "docs" / "file").write_text("b")  # a result that was just written makes nothing dirty
    assert provenance.commit_and_dirty() == (commit, False)
    (tmp_path / "tools" / "new").write_text("b")
    assert provenance.commit_and_dirty() == (commit, True)
    assert provenance.changed_files(commit, tmp_path / "tools") == 0  # a file, but no code
    code = tmp_path / "tools" / "a.py"
    code.write_text("1"), git("add", "-A"), git("commit", "-qm", "y")
    assert provenance.changed_files(commit, tmp_path / "tools") == 1
    assert provenance.changed_files(commit, tmp_path / "docs") == 0
    assert provenance.changed_files("0" * 40, tmp_path / "tools") is None  # a clone that lacks the commit
    assert provenance.changed_files(None, tmp_path / "tools") is None


def test_provenance_names_machine_and_versions() -> None:
    found = provenance.provenance("cpu")
    assert {"commit", "dirty", "device", "cpu", "versions"} <= set(found) and "driver" not in found
    assert {"python", "torch", "triton", "transformers", "numpy"} <= set(found["versions"])


@pytest.mark.gpu
def test_provenance_names_gpu_and_driver() -> None:
    found = provenance.provenance("cuda")
    assert "NVIDIA" in found["device"] and found["driver"][0].isdigit() and found["versions"]["cuda"]


def test_one_hash_for_the_same_code(tmp_path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = provenance.sources_sha256(tmp_path)
    (tmp_path / "notes.md").write_text("any")
    assert provenance.sources_sha256(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert provenance.sources_sha256(tmp_path) != before


def test_json_files_are_short_lines_and_whole_numbers(tmp_path) -> None:
    data = {
        "a": list(range(300)),
        "b": [{"x": 0.123456789, "y": [1, [2]]}] * 9,
        "c": {str(i): "a, b" for i in range(60)},
    }
    json_files.write(tmp_path / "new" / "a.json", data)
    text = (tmp_path / "new" / "a.json").read_text()
    assert max(map(len, text.splitlines())) <= json_files.WIDTH + 2
    assert len(text.splitlines()) < 45
    assert json.loads(text) == data | {"b": [{"x": 0.123457, "y": [1, [2]]}] * 9}
    assert json.loads(json_files.dumps(1234567.8, digits=10)) == 1234567.8
    assert (
        json.loads(json_files.dumps({"n": 2**60, "t": True, "none": None, "np": np.int64(3).item()}))["n"]
        == 2**60
    )
    assert asdict(QUESTIONS[0])["name"] == "questions"
