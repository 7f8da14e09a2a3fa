"""Hugging Face `generate` on the same prompts, one at a time: what a reader has without any engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..models.cache import find_model
from .bench_plans import HF_MODES
from .floor import engine_dtype
from .stages_door import encode_prompts

MODES = dict(zip(HF_MODES, ({}, {"prompt_lookup_num_tokens": 10}), strict=True))
WARM_UP_TOKENS = 8


def measure_hf(
    model: str,
    mode: str,
    questions: Sequence[str],
    raw: bool,
    new_tokens: int,
    device: str,
    dtype: str,
    advance: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Answer each question once, one after another, with exactly `new_tokens` tokens.

    Args: model is a folder or a name in the cache; mode is one of MODES; dtype is the engine's.
    Returns {"seconds", "tokens", "requests", "batch": 1}.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    advance("loading")
    folder = find_model(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = engine_dtype(config, device, dtype)
    prompts = encode_prompts(AutoTokenizer.from_pretrained(folder), questions, raw)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(device)
    config = found.generation_config
    config.pad_token_id, config.eos_token_id = config.pad_token_id or 0, None  # the end of turn is ignored

    def answer(prompt: list[int], limit: int) -> int:
        ids = torch.tensor([prompt], device=device)
        wanted = {"max_new_tokens": limit, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return found.generate(ids, **wanted, **MODES[mode]).shape[1] - len(prompt)

    with torch.inference_mode():
        answer(prompts[0], WARM_UP_TOKENS)
        if device == "cuda":
            torch.cuda.synchronize()
        start, tokens = time.perf_counter(), 0
        for number, prompt in enumerate(prompts, 1):
            advance(f"prompt {number} of {len(prompts)}")
            tokens += answer(prompt, new_tokens)
        return {
            "seconds": time.perf_counter() - start,
            "tokens": tokens,
            "requests": len(prompts),
            "batch": 1,
        }
