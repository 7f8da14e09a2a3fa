"""Part 1's scheduler knows nothing of the draft model: neither by name nor by what it hands on."""

from __future__ import annotations

import ast
from pathlib import Path

import stages.part1_draft_model
from tests.contract.harness import Engines, Stage, Zoo

FOLDER = Path(stages.part1_draft_model.__file__).parent


def modules_imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_only_the_engine_imports_the_loop():
    for path in FOLDER.rglob("*.py"):
        names = {name.split(".")[0] for name in modules_imported(path)}
        if "speculative" in names:
            assert path == FOLDER / "engine.py"


def test_neither_graphs_nor_ranks_are_left():
    for word in ("CUDAGraph", "torch.distributed", "dp_group", "TARGET_VERIFY", "tree_cache_key"):
        assert not [path for path in FOLDER.rglob("*.py") if word in path.read_text(encoding="utf-8")], word


def test_verification_is_one_extend_over_the_chain(tmp_path):
    """Rows of a request: its last token and the drafts, all with logits, behind a prefix of S entries."""
    zoo = Zoo(tmp_path)
    engines = Engines(Stage("part1_draft_model"), zoo)
    engine = engines.get(tree=(3, 1, 4))
    runner, seen = engine.scheduler.tp_worker.model_runner, []
    real = runner.forward

    def forward(batch):
        output = real(batch)
        seen.append((batch.forward_mode.name, batch.max_q_len, batch.last_rows, len(output.topk_index)))
        return output

    runner.forward = forward
    prompts = zoo.prompts((5, 9), 12)
    results = engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    )
    assert [r["output_ids"] for r in results] == [zoo.r0(p, max_new_tokens=12) for p in prompts]
    assert seen[1] == ("EXTEND", 4, None, 2 * 4)
    engines.close()
