"""The file behind speculative_adaptive_config: which numbers of steps a batch may draft, and when it changes.

Restates what adaptive_spec_params.py of sglang/srt/speculative reads. As server_args.py, the file is the same
in every stage. A JSON object has a slot for each batch size from which on it holds; what stands beside the
slots holds for all that do not say otherwise:

    {"ema_alpha": 0.3, "1": {"candidate_steps": [1, 3]}, "16": {"candidate_steps": [0, 1], "ema_alpha": 0.2}}
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AdaptiveSlot:
    """What holds for the batch sizes of one slot."""

    candidate_steps: tuple[int, ...]  # ascending; 0 stands for no drafting
    ema_alpha: float = 0.2  # weight of the newest batch in the average
    update_interval: int = 5  # batches between two decisions
    warmup_batches: int = 10  # batches before the first
    down_hysteresis: float = -0.25  # added to the threshold that the average must not exceed to go down
    up_hysteresis: float = 0.0  # added to the threshold that it must exceed to go up
    ceiling_coeff: float = 0.0  # where above 0, not more steps than this times the average, unless it went up


_DEFAULT = {
    1: AdaptiveSlot((1, 3, 5, 7)),
    8: AdaptiveSlot((0, 1, 3), down_hysteresis=0.0),
    32: AdaptiveSlot((0, 1), down_hysteresis=0.0),
    64: AdaptiveSlot((0,), down_hysteresis=0.0),
}


def all_candidate_steps(slots: dict[int, AdaptiveSlot]) -> list[int]:
    """Those of all slots, ascending."""
    return sorted({steps for slot in slots.values() for steps in slot.candidate_steps})


def read_adaptive_config(path: str | None, most_steps: int) -> dict[int, AdaptiveSlot]:
    """Batch size → the slot that holds from it on; upstream's own where there is no file.

    Raises:
        ValueError: the file cannot be read, or holds what no slot can have; one sentence with the way out.
    """
    if path is None:
        return _DEFAULT
    flag = f"speculative_adaptive_config={path!r}"
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} cannot be read as JSON ({error}); give the path of such a file.") from None
    if not isinstance(config, dict):
        raise ValueError(f'{flag} holds no object; write {{"1": {{"candidate_steps": [1, 3]}}}} or like it.')
    slots = {int(key): entry for key, entry in config.items() if key.isdecimal()}
    if not slots or 0 in slots:
        raise ValueError(
            f"{flag} needs a slot for at least one batch size, from 1 up, such as "
            '"1": {"candidate_steps": [1, 3]}, and has ' + (", ".join(map(repr, config)) or "nothing") + "."
        )
    shared = {key: value for key, value in config.items() if not key.isdecimal()}
    if "candidate_steps" in shared:
        raise ValueError(f"{flag} has candidate_steps beside its slots; each slot needs its own.")
    _check(flag, shared, most_steps)
    made = {}
    for size, entry in sorted(slots.items()):
        where = f"slot {size} of {flag}"
        if not isinstance(entry, dict) or "candidate_steps" not in entry:
            raise ValueError(
                f'{where} has no candidate_steps; write {{"candidate_steps": [1, 3]}} or like it.'
            )
        _check(where, entry, most_steps)
        steps = tuple(sorted(set(entry["candidate_steps"])))
        made[size] = AdaptiveSlot(**{**shared, **entry, "candidate_steps": steps})
    return made


def _check(where: str, entry: dict[str, Any], most_steps: int) -> None:
    """Refuse keys that no slot has and values that its key cannot have."""

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    def is_whole(value: Any, low: int, high: float = math.inf) -> bool:
        return is_number(value) and isinstance(value, int) and low <= value <= high

    checks = {
        "candidate_steps": (
            lambda value: (
                isinstance(value, list) and value and all(is_whole(n, 0, most_steps) for n in value)
            ),
            f"a list of whole numbers from 0 to {most_steps}",
        ),
        "ema_alpha": (lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
        "update_interval": (lambda value: is_whole(value, 1), "a whole number from 1 up"),
        "warmup_batches": (lambda value: is_whole(value, 0), "a whole number from 0 up"),
        "down_hysteresis": (is_number, "a number"),
        "up_hysteresis": (is_number, "a number"),
        "ceiling_coeff": (lambda value: is_number(value) and value >= 0, "a number from 0 up"),
    }
    known = [field.name for field in dataclasses.fields(AdaptiveSlot)]
    for key, value in entry.items():
        if key not in known:
            raise ValueError(f"{where} has an unknown key {key!r}; known are {', '.join(known)}.")
        is_right, wanted = checks[key]
        if not is_right(value):
            raise ValueError(f"{where} has {key}={value!r}, and that is not allowed; give {wanted}.")
