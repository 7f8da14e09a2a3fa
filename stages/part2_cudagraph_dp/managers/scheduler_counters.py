"""What an engine counts. Restates what sglang/srt/managers/scheduler.py logs after its steps (v0.4.6)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .schedule_batch import Req


@dataclass
class Counters:
    """What `get_server_info()` shows; reset by `flush_cache`."""

    forward_ct_prefill: int = 0
    forward_ct_decode: int = 0
    num_retractions: int = 0
    num_finished: int = 0
    completion_tokens: int = 0
    spec_verify_ct: int = 0
    spec_num_proposed_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = field(default_factory=list)
    schedule_seconds: float = 0.0
    run_seconds: float = 0.0
    process_seconds: float = 0.0

    def add_finished(self, req: Req) -> None:
        self.num_finished += 1
        self.completion_tokens += len(req.output_ids)
        self.spec_verify_ct += req.spec_verify_ct
        self.spec_num_proposed_drafts += req.spec_num_proposed_drafts
        pairs = itertools.zip_longest(
            self.spec_correct_drafts_histogram, req.spec_correct_drafts_histogram, fillvalue=0
        )
        self.spec_correct_drafts_histogram = [a + b for a, b in pairs]


def average_correct_drafts(histogram: list[int]) -> float:
    """Correct drafts per verification, where histogram[n] verifications had n; 0 if there was none."""
    rounds = sum(histogram)
    return sum(n * count for n, count in enumerate(histogram)) / rounds if rounds else 0.0
