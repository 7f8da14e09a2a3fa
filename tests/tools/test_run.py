"""`fledge run`: rounds out of a stream, the painted text, the summary, and bad input in one sentence."""

import dataclasses
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stages.part4_worker.server_args import ServerArgs
from tools.bench import engine_flags
from tools.bench.measure import measure, model_forwards, step_phases
from tools.bench.run import Painter, Round, accept_counts, rounds_of
from tools.bench.stages_door import (
    DRAFTS,
    HEAD,
    STAGES,
    TARGET,
    TREE_FLAGS,
    BadInput,
    merge_flags,
    plain_flags,
    read_prompts,
    resolve_stage,
    shape_name,
)

ESCAPE = "\x1b"
PROMPT = "the ab cd"


def result(ids: list[int], histogram: list[int] | None = None, text: str = "") -> dict:
    meta = {} if histogram is None else {"spec_correct_drafts_histogram": histogram}
    return {"output_ids": ids, "text": text, "meta_info": meta}


# rounds


def test_a_round_is_what_a_dict_has_more_than_the_one_before() -> None:
    stream = [
        result([1]),
        result([1, 2, 3, 4], [0, 0, 1]),
        result([1, 2, 3, 4, 5], [1, 0, 1]),
        result([1, 2, 3, 4, 5, 6, 7], [1, 0, 2]),  # ends inside the run: two drafts, and no token behind them
        result([1, 2, 3, 4, 5, 6, 7], [1, 0, 2]),
    ]
    assert [step for _, step in rounds_of(stream)] == [
        Round([1], 0), Round([2, 3, 4], 2), Round([5], 0), Round([6, 7], 2), Round([], 0),
    ]  # fmt: skip


def test_a_plain_stream_has_no_drafts() -> None:
    assert [step.accepted for _, step in rounds_of([result([1]), result([1, 2])])] == [0, 0]


def test_accept_counts_say_how_often_and_out_of_how_many() -> None:
    # 5 rounds accepted nothing, 3 one draft, 0 two, 2 all three.
    assert accept_counts([5, 3, 0, 2], 3) == [(5, 10), (2, 5), (2, 2)]
    assert accept_counts([4], 3) == [(0, 4), (0, 0), (0, 0)]  # the histogram grows with what was accepted
    assert accept_counts([], 2) == [(0, 0), (0, 0)]


class Letters:
    """A detokenizer whose tokens are texts, of which "half" waits for the token after it."""

    def __init__(self) -> None:
        self.text = self.held = ""

    def append(self, token: str) -> None:
        if token == "half":
            self.held = "é"
        else:
            self.text, self.held = self.text + self.held + token, ""

    def stream_text(self) -> str:
        return self.text


def painted(plain: bool, steps: list[tuple[str, Round]]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", highlight=False, width=10)
    painter = Painter(console, Letters(), plain)
    for text, step in steps:
        painter.show(text, step)
    return out.getvalue()


def test_each_round_has_a_colour_and_the_targets_own_token_is_underlined() -> None:
    steps = [
        ("one", Round(["one"], 0)),
        ("one two three", Round([" two", " three"], 1)),
        ("one two three four", Round([" four"], 0)),
    ]
    assert painted(False, steps) == (
        "\x1b[4mone\x1b[0m\x1b[36m two\x1b[0m\x1b[4;36m three\x1b[0m\x1b[4;33m four\x1b[0m"
    )
    assert painted(True, steps) == "one two three four"


def test_text_that_was_held_back_keeps_the_colour_of_its_own_round() -> None:
    steps = [
        ("a", Round(["a"], 0)),
        ("a", Round(["b", "c"], 1)),  # a stop string may have begun here
        ("abcd", Round(["d"], 0)),
        ("abcd", Round(["half"], 0)),
        ("abcdé!", Round(["!"], 0)),
    ]
    out = painted(False, steps)
    assert out.startswith("\x1b[4ma\x1b[0m\x1b[36mb\x1b[0m\x1b[4;36mc\x1b[0m\x1b[4;33md\x1b[0m")
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == "abcdé!"


def test_the_last_text_may_be_longer_than_the_tokens_say() -> None:
    assert painted(True, [("a", Round(["a"], 0)), ("a\ufffd\n", Round([], 0))]) == "a\ufffd\n"


# the command


def test_what_is_printed_is_what_the_engine_says(fledge, zoo, tiny_flags, tiny_options) -> None:
    from stages.part4_worker import Engine

    done = fledge("run", "part4_worker", "--prompt", PROMPT, "--max-new-tokens", 20, *tiny_options)
    assert done.exit_code == 0, done.output
    assert ESCAPE not in done.stdout
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    with Engine(**tiny_flags, speculative_algorithm="EAGLE", **shape) as engine:
        wanted = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 20})
        forwards = engine.get_server_info()["forward_ct"]
    meta, rounds = wanted["meta_info"], wanted["meta_info"]["spec_verify_ct"]
    text, _, rest = done.stdout.rpartition("\n\ntree 3/4/8, cpu, float32, torch_native: ")
    assert text.rstrip("\n") == wanted["text"].rstrip("\n")
    assert rest.startswith(f"{meta['prompt_tokens']} prompt tokens, {meta['completion_tokens']} new ones in ")
    assert f"{meta['tokens_per_round']:.2f} tokens per round" in rest
    assert f"rounds     {rounds}, " in rest
    accepted = sum(meta["spec_correct_drafts_histogram"][1:])
    assert f"accepted   draft 1: {accepted} of {rounds} " in rest
    assert f"forwards   target {forwards['target']}, draft {forwards['draft']}, for " in rest
    for phase in ("prefill", "draft", "verify", "draft extend", "commit", "schedule", "process", "rest"):
        assert re.search(rf"{phase} [\d.]+%", rest), phase


def test_colours_on_a_terminal_and_none_with_no_color(fledge, tiny_options, monkeypatch) -> None:
    words = ["run", "part4_worker", "--prompt", PROMPT, "--max-new-tokens", 12, *tiny_options]
    plain = fledge(*words).stdout
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = fledge(*words).stdout
    assert f"{ESCAPE}[4;36m" in coloured and f"{ESCAPE}[4;33m" in coloured
    text = plain.partition("\n\ntree ")[0]
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).startswith(text)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in fledge(*words).stdout


def test_plain_decoding_has_no_rounds(fledge, tiny_options) -> None:
    done = fledge(
        "run", "part4_worker", "--prompt", PROMPT, "--max-new-tokens", 5, *tiny_options,
        "--speculative-algorithm", "none",
    )  # fmt: skip
    assert done.exit_code == 2 and "speculative_draft_model_path" in done.stderr  # contradicts the head given
    options = [word for word in tiny_options if "head" not in word and "draft" not in word]
    done = fledge("run", "part4_worker", "--prompt", PROMPT, "--max-new-tokens", 5, *options)
    assert done.exit_code == 0, done.output
    assert "plain, cpu, float32" in done.stdout and "rounds" not in done.stdout
    assert "forwards   target 5, for 5 tokens" in done.stdout


def test_a_seed_makes_sampling_repeatable(fledge, tiny_options) -> None:
    words = ["run", "part4_worker", "--prompt", PROMPT, "--temperature", 1.5, *tiny_options]

    def text(*more) -> str:
        return fledge(*words, "--max-new-tokens", 12, *more).stdout.partition("\n\ntree ")[0]

    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no_such_stage"], "There is no stage 'no_such_stage': give a name (part"),
        (["part4_worker", "--page-size", "3"], "page_size=3 is not allowed"),
        (["part4_worker", "--speculative-eagle-topk", "17"], "speculative_eagle_topk=17 is not allowed"),
        (["part4_worker", "--cuda-graph-bs", "1,x"], "--cuda-graph-bs '1,x' is not allowed"),
        (["part4_worker", "--enable-multi-layer-eagle"], "does not have a draft module for each step"),
        (["part4_worker", "--model-path", "no-such-model"], "no model 'no-such-model'"),
        (["part4_worker", "--max-total-tokens", "8"], "pool"),
    ],
)
def test_bad_input_is_one_sentence(fledge, tiny_options, words: list[str], sentence: str) -> None:
    done = fledge("run", words[0], "--prompt", PROMPT, *tiny_options, *words[1:])
    assert done.exit_code == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.output


def test_an_unknown_flag_is_refused(fledge) -> None:
    done = fledge("run", "part4_worker", "--prompt", PROMPT, "--page-sise", 4)
    assert done.exit_code == 2 and "--page-sise" in done.stderr


def test_without_a_chat_template_raw_is_asked_for(fledge, tiny_options) -> None:
    options = [word for word in tiny_options if word != "--raw"]
    done = fledge("run", "part4_worker", "--prompt", PROMPT, *options)
    assert done.exit_code == 2
    assert "has no chat template: add --raw" in done.stderr and done.stderr.count("\n") == 1


# flags


def test_every_engine_flag_is_an_option(fledge) -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)} - {"features"}
    assert set(engine_flags._flag_fields()) == fields
    assert "_fledge_server_args" not in sys.modules


def test_defaults_come_from_the_stage_and_give_way_as_a_whole() -> None:
    stage = resolve_stage("part4_worker")
    defaults = merge_flags(stage, {})
    assert defaults["model_path"] == TARGET and defaults["speculative_draft_model_path"] == HEAD
    assert defaults["speculative_algorithm"] == "EAGLE" and defaults["speculative_eagle_topk"] == 4
    chain = merge_flags(stage, {"speculative_eagle_topk": 1})
    assert chain["speculative_eagle_topk"] == 1 and "speculative_num_steps" not in chain
    # What drafts chains alone is not refused for a tree that nobody asked for.
    modules = merge_flags(stage, {"enable_multi_layer_eagle": True})
    assert modules["speculative_draft_model_path"] == HEAD and "speculative_eagle_topk" not in modules
    assert merge_flags(stage, {"speculative_algorithm": "None"}) == {"model_path": TARGET}
    # A look-up has neither a head nor a tree's shape.
    looked_up = {"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 5}
    assert merge_flags(stage, looked_up) == {"model_path": TARGET} | looked_up
    # The default shape with a draft of another kind; one for another target is nobody's default.
    alone = {"speculative_algorithm": "STANDALONE"}
    assert merge_flags(stage, alone) == defaults | alone | {
        "speculative_draft_model_path": DRAFTS["standalone"]
    }
    assert merge_flags(stage, alone | {"model_path": "other"}) == alone | {"model_path": "other"}
    mine = alone | {"speculative_draft_model_path": "mine"}
    assert merge_flags(stage, mine) == defaults | mine
    # A head serves one target only.
    assert merge_flags(stage, {"model_path": "other"}) == {"model_path": "other"}
    both = {"model_path": "other", "speculative_draft_model_path": "its head"}
    assert merge_flags(stage, both) == defaults | both
    assert plain_flags(defaults | {"page_size": 4}) == {"model_path": TARGET, "page_size": 4}


def test_what_is_drafted_has_a_name() -> None:
    def name(algorithm: str | None, *shape: int | None) -> str:
        return shape_name({"speculative_algorithm": algorithm, **dict(zip(TREE_FLAGS, shape, strict=True))})

    assert name(None, None, None, None) == "plain" and name("NGRAM", None, None, 12) == "n-grams 12"
    assert name("EAGLE", 3, 1, 4) == "chain 3/1/4" and name("EAGLE", 3, 4, 8) == "tree 3/4/8"


# the door


def test_a_stage_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert resolve_stage("part4_worker") == resolve_stage(str(STAGES / "part4_worker"))
    with pytest.raises(BadInput, match="part4_worker"):
        resolve_stage(str(tmp_path))
    (tmp_path / "stage.toml").write_text("name = 'x'\n")
    with pytest.raises(BadInput, match="under \\[features\\]"):
        resolve_stage(str(tmp_path))


def test_a_copied_stage_runs_by_itself(tmp_path: Path, fledge, tiny_options) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(STAGES / "part4_worker", copy, ignore=shutil.ignore_patterns("__pycache__"))
    # A mark that only the copy has: if the original ran in its place, the run would not end so.
    scheduler = copy / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text() + "\n\nMARK = __name__\n")
    words = ["--prompt", PROMPT, "--max-new-tokens", 8, *tiny_options]
    original, copied = fledge("run", "part4_worker", *words), fledge("run", copy, *words)
    assert copied.exit_code == 0, copied.output
    assert copied.stdout.partition("\n\ntree")[0] == original.stdout.partition("\n\ntree")[0]
    package = resolve_stage(str(copy)).package().__name__
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    assert own[f"{package}.managers.scheduler"].MARK == f"{package}.managers.scheduler"
    assert all(Path(module.__file__).is_relative_to(copy) for module in own.values())
    for name in own:
        del sys.modules[name]


def test_a_stage_that_cannot_be_imported_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "stage.toml").write_text("[features]\npresent = []\n")
    (tmp_path / "__init__.py").write_text("raise RuntimeError('broken')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            resolve_stage(str(tmp_path)).package()


def test_prompts_are_read_from_json_and_from_lines(tmp_path: Path) -> None:
    for name, content, prompts in [
        ("a.json", '["x", "y z"]', ["x", "y z"]),
        ("b.json", '{"about": "…", "questions": ["x"]}', ["x"]),
        ("c.txt", "x\n\n  \ny z\n", ["x", "y z"]),
    ]:
        (tmp_path / name).write_text(content)
        assert read_prompts(tmp_path / name) == prompts
    bad = {"d.json": "{", "e.json": '{"questions": [1]}', "f.txt": "\n", "g.json": "3"}
    for name, content in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(BadInput, match=name):
            read_prompts(tmp_path / name)
    with pytest.raises(BadInput, match=r"none\.txt"):
        read_prompts(tmp_path / "none.txt")


# measuring


def test_measuring_counts_and_leaves_nothing_behind(tiny_flags) -> None:
    stage = resolve_stage("part4_worker")
    with stage.open(**merge_flags(stage, tiny_flags)) as engine:
        owners = [engine.scheduler.tp_worker, engine.scheduler.draft_worker]
        owners += [worker.model_runner for worker in owners]
        before = [set(vars(owner)) for owner in owners]
        for spots in (step_phases(engine), model_forwards(engine)):
            with measure(engine, spots, counters=True) as cost:
                out = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 9})
            rounds = out["meta_info"]["spec_verify_ct"]
            # One prefill each, then per round one verification, two levels of drafts and one draft extend.
            assert (cost.target_forwards, cost.draft_forwards) == (1 + rounds, 1 + 3 * rounds)
            assert all(seconds > 0 for seconds in cost.seconds.values())
            assert (
                0
                < sum(cost.seconds.values())
                <= cost.total
                == pytest.approx(sum(cost.seconds.values()) + cost.rest)
            )
        assert [set(vars(owner)) for owner in owners] == before


@pytest.mark.model
def test_the_embedded_model_answers(fledge, target_path, head_path) -> None:
    words = ["run", "part4_worker", "--prompt", "What is the capital of France?", "--max-new-tokens", 16]
    done = fledge(*words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("The capital of France is Paris.")
    assert "tree 3/4/8" in done.stdout and "tokens per round" in done.stdout
    plain = fledge(*words, "--speculative-algorithm", "none")
    assert plain.stdout.partition("\n\n")[0] == done.stdout.partition("\n\n")[0]
