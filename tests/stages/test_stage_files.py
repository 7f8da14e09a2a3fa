"""Each stage.toml tells the truth about the code beside it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import stages
from tests.contract.harness import Stage

FOLDERS = sorted(path.parent for path in Path(stages.__file__).parent.glob("*/stage.toml"))
TABLES = {folder: tomllib.loads((folder / "stage.toml").read_text(encoding="utf-8")) for folder in FOLDERS}
SYMBOLS = [(folder, entry) for folder, table in TABLES.items() for entry in table["symbols"]]

every_stage = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def defined(path):
    """Every class, function and method of a file, as `name` or `Class.name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    "folder, entry", SYMBOLS, ids=[f"{folder.name}-{entry['here']}" for folder, entry in SYMBOLS]
)
def test_every_symbol_of_the_map_is_here(folder, entry):
    file, name = entry["here"].split(":")
    assert name in defined(folder / file)
    assert re.fullmatch(r"(python/sglang|sgl-kernel)/[\w/.-]+:[\w.]+", entry["upstream"])


@every_stage
def test_every_commit_is_named_in_full_or_by_ten_digits(folder):
    table = TABLES[folder]
    single = [*table["symbols"], *table.get("groundwork", []), *table.get("follow_ups", [])]
    groups = [[entry["commit"]] for entry in single]
    groups += [entry["commits"] for entry in table["held_back"] + table["ahead"]]
    upstream = table["upstream"]
    for commit in sum(groups, [upstream["commit"], upstream.get("until", upstream["commit"])]):
        assert re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{10}", commit)


@every_stage
def test_what_is_held_back_is_missing_and_the_name_is_the_folder(folder):
    features = Stage(folder.name).module("server_args").Features.load()
    assert features.stage == folder.name
    assert {entry["feature"] for entry in TABLES[folder]["held_back"]} <= set(features.missing)


@every_stage
def test_a_feature_arrives_later_and_stays(folder):
    """What a stage lacks arrives in a later one, which has it, as has every stage after that."""
    names, table = [path.name for path in FOLDERS], TABLES[folder]["features"]
    for feature, entry in table["missing"].items():
        arrives = entry["arrives"]
        assert arrives not in names[: names.index(folder.name)]
        if arrives in names[names.index(folder.name) + 1 :]:
            has = [feature in TABLES[path]["features"]["present"] for path in FOLDERS]
            is_there = [name >= arrives for name in names]
            assert has == is_there or feature in TABLES[FOLDERS[-1]]["features"]["missing"], feature


@every_stage
def test_the_default_flags_of_a_run_are_accepted(folder):
    run = TABLES[folder]["run"]
    args = (
        Stage(folder.name)
        .module("server_args")
        .ServerArgs.from_kwargs(None, model_path="m", device="cpu", speculative_draft_model_path="d", **run)
    )
    assert args.speculative_num_steps == run["speculative_num_steps"]
    topk = run.get("speculative_eagle_topk", 1)
    nodes = run.get("speculative_num_draft_tokens", run["speculative_num_steps"] + 1)
    assert (args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (topk, nodes)


@every_stage
def test_both_sets_of_kernels_have_the_same_functions(folder):
    kernels = Stage(folder.name).module("kernels")
    native, triton = (kernels.load_kernels(name) for name in kernels.KERNEL_SETS)
    assert native.__all__ == triton.__all__
    for name in native.__all__:
        assert hasattr(native, name) and hasattr(triton, name)


def test_the_flags_are_the_same_file_everywhere():
    for name in ("server_args.py", "arg_groups/speculative_hook.py"):
        first, *others = ((folder / name).read_bytes() for folder in FOLDERS)
        assert all(other == first for other in others)
