"""stage.toml tells the truth about the code beside it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import stages.part4_worker
from stages.part4_worker.server_args import Features, ServerArgs

FOLDER = Path(stages.part4_worker.__file__).parent
TABLE = tomllib.loads((FOLDER / "stage.toml").read_text(encoding="utf-8"))


def defined(path):
    """Every class, function and method of a file, as `name` or `Class.name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("entry", TABLE["symbols"], ids=lambda entry: entry["here"])
def test_every_symbol_of_the_map_is_here(entry):
    file, name = entry["here"].split(":")
    assert name in defined(FOLDER / file)
    assert re.fullmatch(r"(python/sglang|sgl-kernel)/[\w/.-]+:[\w.]+", entry["upstream"])


def test_every_commit_is_named_in_full_or_by_ten_digits():
    groups = [[entry["commit"]] for entry in TABLE["symbols"] + TABLE["follow_ups"]]
    groups += [entry["commits"] for entry in TABLE["held_back"] + TABLE["ahead"]]
    for commit in sum(groups, [TABLE["upstream"]["commit"], TABLE["upstream"]["until"]]):
        assert re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{10}", commit)


def test_what_is_held_back_is_missing_and_the_name_is_the_folder():
    features = Features.load()
    assert features.stage == FOLDER.name
    assert {entry["feature"] for entry in TABLE["held_back"]} <= set(features.missing)


def test_the_default_flags_of_a_run_are_accepted():
    args = ServerArgs.from_kwargs(
        None, model_path="m", device="cpu", speculative_draft_model_path="d", **TABLE["run"]
    )
    assert args.speculative_num_draft_tokens == TABLE["run"]["speculative_num_draft_tokens"]
