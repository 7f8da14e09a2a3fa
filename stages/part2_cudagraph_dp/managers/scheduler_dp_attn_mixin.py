"""How the ranks of DP attention agree on a step. Restates Scheduler.prepare_dp_attn_batch of sglang v0.4.6.

Each rank has chosen its own batch: a prefill, requests that decode, or nothing. All of them run side by side
in one step. So nobody waits for another rank's prompts, and the collectives are the same on all ranks
whatever they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.dp_attention import GlobalStep
from .schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from .scheduler import Scheduler


class SchedulerDPAttnMixin:
    def prepare_dp_attn_batch(self: Scheduler, batch: ScheduleBatch | None) -> ScheduleBatch | None:
        """Agree with the other ranks on the step; a rank without work runs IDLE, None if no rank has any."""
        extends = batch is not None and batch.forward_mode.is_extend()
        step = GlobalStep.agree(
            self.dp_group,
            extend_tokens=len(batch.out_cache_loc) if extends else 0,
            decode_bs=batch.batch_size() if batch is not None and not extends else 0,
        )
        if step is None:
            return None
        if batch is None:
            batch = self.get_idle_batch()
        batch.global_step = step
        return batch

    def get_idle_batch(self: Scheduler) -> ScheduleBatch:
        """A batch without requests, run because other ranks have some."""
        return self._new_batch([])
