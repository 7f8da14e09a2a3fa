"""`eval-head`: plays the simulation on held-out answers and on a list of questions, and asks an engine
whether it agrees.

What it returns says where the numbers come from, so that it can be kept as a JSON file beside the head.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.configurations import Shape
from ..bench.stages_door import read_prompts
from ..provenance import provenance
from .cache import ModelError, sha256_of
from .head_data import Template, load_text
from .head_eval import CHAINS, TREES, rows_of, simulate
from .head_model import FrozenTarget, Head, load_head
from .head_progress import progress_bar

ENGINE_TOLERANCE = 0.03  # tokens per round
ENGINE_SHAPES: tuple[Shape, ...] = ((3, 1, 4), (3, 4, 8))


def check_engine(
    open_engine: Callable[..., Any],
    head: Head,
    target: FrozenTarget,
    folders: tuple[str, str],
    prompts: list[list[int]],
    new_tokens: int,
    shapes: Sequence[Shape] = ENGINE_SHAPES,
) -> list[dict[str, Any]]:
    """Run the engine on a few prompts and the simulation on the engine's own outputs.

    Args: open_engine is called like `Engine` and gives a context manager; folders are the target's and the
    head's.
    Returns per shape both numbers and whether they agree within ENGINE_TOLERANCE.
    """
    found = []
    for steps, topk, draft_tokens in shapes:
        with open_engine(
            model_path=folders[0],
            device=target.device.type,
            dtype="float32",
            speculative_algorithm=head.algorithm,
            speculative_draft_model_path=folders[1],
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=draft_tokens,
        ) as engine:
            wanted = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            results = engine.generate(input_ids=prompts, sampling_params=[wanted] * len(prompts))
        rows = [np.array([*p, *result["output_ids"]]) for p, result in zip(prompts, results, strict=True)]
        lengths = np.array([len(prompt) for prompt in prompts])
        rounds = sum(result["meta_info"]["spec_verify_ct"] for result in results)
        tokens = sum(len(result["output_ids"]) - 1 for result in results)
        (simulated,) = simulate(head, target, rows, lengths, [(steps, topk, draft_tokens)])
        expected, measured = simulated.tokens_per_round, tokens / max(1, rounds)
        found.append(
            {
                "steps": steps,
                "topk": topk,
                "draft_tokens": draft_tokens,
                "engine": round(measured, 4),
                "simulation": round(expected, 4),
                "agrees": abs(measured - expected) <= ENGINE_TOLERANCE,
            }
        )
    return found


def evaluate(
    target_folder: str | os.PathLike,
    head_folder: str | os.PathLike,
    text_folder: str | os.PathLike | None = None,
    questions: str | os.PathLike | None = None,
    device: str = "cpu",
    limit: int | None = None,
    max_tokens: int | None = None,
    cut_loops: bool = False,
    new_tokens: int = 256,
    shapes: Sequence[Shape] = CHAINS + TREES,
    open_engine: Callable[..., Any] | None = None,
    engine_prompts: int = 4,
    engine_tokens: int = 64,
) -> dict[str, Any]:
    """Measure a head; see the sections of the result.

    Args: text_folder holds held-out answers (`limit` of them, each cut to `max_tokens` and, with `cut_loops`,
    where it only repeats itself); questions is a JSON file of user turns, answered here with the end of turn
    ignored (`new_tokens` each); open_engine, if given, is checked against the simulation on the first
    `engine_prompts` prompts of whichever is there.
    """
    if text_folder is None and questions is None:
        raise ModelError("Nothing to measure on: give held-out text (--text), --questions, or both.")
    target = FrozenTarget(target_folder, device, torch.float32)
    head = load_head(head_folder, device)
    if (head.config.vocab_size, head.config.hidden_size) != tuple(target.lm_head.shape):
        raise ModelError(
            f"The head in {head_folder} was made for a target of another size than {target_folder}."
        )
    result: dict[str, Any] = {
        **provenance(target.device.type),
        "head_sha256": sha256_of(Path(head_folder) / "model.safetensors"),
        "dtype": "float32",
    }
    prompts: list[list[int]] = []

    def section(name: str, rows: list[np.ndarray], lengths: np.ndarray, **about: Any) -> None:
        prompts.extend(row[:length].tolist() for row, length in zip(rows, lengths, strict=True))
        with progress_bar() as progress:
            task = progress.add_task(name, total=sum(len(row) for row in rows) * len(shapes))
            played = simulate(
                head, target, rows, lengths, shapes, on_played=lambda n: progress.advance(task, n)
            )
        found = [rounds.summary() for rounds in played]
        result[name] = {"answers": len(rows), **about, "shapes": found}

    if text_folder is not None:
        rows, lengths = rows_of(load_text(text_folder, held_out=True), max_tokens, limit, cut_loops)
        section("held_out", rows, lengths, max_tokens=max_tokens, cut_loops=cut_loops)
    if questions is not None:
        from transformers import AutoTokenizer

        asked = Template(AutoTokenizer.from_pretrained(target_folder)).prompts(read_prompts(Path(questions)))
        rows = target.greedy(asked, new_tokens)
        section("questions", rows, np.array([len(prompt) for prompt in asked]), new_tokens=new_tokens)
    if open_engine is not None:
        folders = (str(target_folder), str(head_folder))
        result["engine"] = check_engine(
            open_engine, head, target, folders, prompts[:engine_prompts], engine_tokens
        )
    return result
