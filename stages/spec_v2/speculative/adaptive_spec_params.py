"""How many steps the next round drafts, from what the last ones accepted.

Restates sglang/srt/speculative/adaptive_spec_params.py (#21599; by batch size #24055; step 0 #23994). All of
it is on the host and knows nothing of workers: the same results give the same steps. Under overlap a result
comes one step late, and may be of a round that was launched before the last decision.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from ..arg_groups.adaptive_config import AdaptiveSlot, all_candidate_steps


class AdaptiveStepSlot:
    """The steps of the batches of one slot.

    Args:
        config: what holds for them.
        initial_steps: to begin with, where that is a candidate; else the middle one is taken.
    """

    def __init__(self, config: AdaptiveSlot, initial_steps: int):
        self.config, candidates = config, config.candidate_steps
        middle = candidates[len(candidates) // 2]
        self.current_steps = initial_steps if initial_steps in candidates else middle
        # Correct drafts of a request, averaged; at first one less than it drafts. Below 0: none known.
        self.ema_accept_len = float(self.current_steps - 1)
        self.batches = 0

    def update(self, num_correct_drafts_per_req: list[int], num_steps: int) -> None:
        """Take in one round's result; one of 0 steps says nothing of drafts, only that time passes."""
        config = self.config
        if num_steps > 0:
            average = sum(num_correct_drafts_per_req) / len(num_correct_drafts_per_req)
            self.ema_accept_len += config.ema_alpha * (average - self.ema_accept_len)
        self.batches += 1
        warm = self.batches - config.warmup_batches
        if warm > 0 and warm % config.update_interval == 0:
            self.current_steps = self._decide()

    def _decide(self) -> int:
        config, candidates, average = self.config, self.config.candidate_steps, self.ema_accept_len
        at = start = candidates.index(self.current_steps)
        if self.current_steps == 0:
            # What drafting would give is only known by drafting: try the fewest steps.
            probe = candidates[min(1, len(candidates) - 1)]
            self.ema_accept_len = average if average >= 0 else float(probe - 1)
            return probe
        while at > 0 and average <= max(candidates[at - 1], 1) - 0.5 + config.down_hysteresis:
            at -= 1
        if at == start:
            while at < len(candidates) - 1 and average > candidates[at] - 0.5 + config.up_hysteresis:
                at += 1
        if config.ceiling_coeff > 0 and at <= start:
            ceiling = max(1, math.ceil(average * config.ceiling_coeff))
            while at > 0 and candidates[at] > ceiling:
                at -= 1
        return candidates[at]


class AdaptiveSpeculativeParams:
    """A slot for each range of batch sizes.

    Args:
        config: batch size → the slot that holds from it on; the first holds below it too.
        initial_steps: see AdaptiveStepSlot.
        cuda_graph_bs: sizes that batches are padded to, ascending: a graph has one slot's shapes only.

    Raises:
        ValueError: no candidate drafts.
    """

    def __init__(
        self, config: dict[int, AdaptiveSlot], initial_steps: int, cuda_graph_bs: Sequence[int] = ()
    ):
        self.config, self.initial_steps, self.cuda_graph_bs = config, initial_steps, cuda_graph_bs
        self.candidate_steps = all_candidate_steps(config)
        if self.candidate_steps == [0]:
            raise ValueError(
                "speculative_adaptive_config never drafts: give a slot another candidate than 0, "
                "or decode plainly."
            )
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._slots = {
            size: AdaptiveStepSlot(slot, self.initial_steps) for size, slot in sorted(self.config.items())
        }

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self._slot(batch_size).current_steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], num_steps: int, batch_size: int
    ) -> None:
        """Take in how many drafts were correct, of each request that goes on after a round of `num_steps`.

        The round was over `batch_size` requests: the slot that chose its steps learns from it.
        """
        self._slot(batch_size).update(num_correct_drafts_per_req, num_steps)

    def cuda_graph_bs_for_step(self, steps: int) -> list[int]:
        """The sizes of graphs in which a round of so many steps can run."""
        return [bs for bs in self.cuda_graph_bs if steps in self._slot(bs).config.candidate_steps]

    def _slot(self, batch_size: int) -> AdaptiveStepSlot:
        index = bisect.bisect_left(self.cuda_graph_bs, batch_size)
        size = self.cuda_graph_bs[index] if index < len(self.cuda_graph_bs) else batch_size
        froms = list(self._slots)
        return self._slots[froms[max(bisect.bisect_right(froms, size) - 1, 0)]]
