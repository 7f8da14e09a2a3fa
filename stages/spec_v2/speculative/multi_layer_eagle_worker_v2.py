"""EAGLE with a draft module for each step, so that all of drafting happens inside the draft extend.

Restates sglang/srt/speculative/multi_layer_eagle_worker_v2.py (#15207, #15632). Module i reads token p+1+i at
p, and beside it what module i − 1 gave at p (module 0: what the target gave; upstream's chain style, #18564).
Each runs over the rows of the one before with the tokens rotated by one place: the last row takes what that
one proposed. k modules propose k tokens, so `draft` has no forward to run, and nothing to grow.

At the end of a text module i > 0 has read proposals in place of tokens: its KV at the last i positions is
as good as they are. So the draft extend runs the k − 1 positions before S once more, over what has become of
them; what it needs for that stands in the future map. (Upstream leaves them as they are, but for hybrid
models, #31681.) For the same reason a prefix is shared as far as the k tokens behind it agree, and a chunk
of a prompt ends where k tokens are left.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.overlap_utils import DecodeStep, FutureMap
from ..managers.tp_worker import TpModelWorker
from ..mem_cache.memory_pool import PADDING_SLOT
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from ..server_args import ServerArgs
from .base_spec_worker import BaseSpecWorker
from .draft_sampler import DraftSampler
from .eagle_cuda_graphs import EagleCudaGraphs
from .eagle_info import EagleDraftInput, EagleVerifyOutput
from .eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2


class MultiLayerEagleDraftWorker(EagleDraftWorker):
    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        super().__init__(server_args, target_worker)
        self.num_front_tokens = self.speculative_num_steps - 1
        self._column = torch.arange(self.draft_extend_width(), device=self.device)

    def draft_slots_per_req(self) -> int:
        return 0

    def init_future_map(self, future_map: FutureMap) -> None:
        """What the next round verifies, and the pairs that its draft extend begins with."""
        TpModelWorker.init_future_map(self, future_map)
        runner, steps, front = self.model_runner, self.speculative_num_steps, self.num_front_tokens
        config = runner.model_config
        EagleDraftInput.init_future_map(future_map, steps, 0, runner.dtype)
        future_map.add_draft_state("front_tokens", (front,), torch.int64)
        future_map.add_draft_state("front_hidden", (front, config.fed_hidden_size), runner.dtype)
        if self.server_args.speculative_use_rejection_sampling:
            future_map.add_draft_state("draft_probs", (steps, config.vocab_size), torch.float32)

    def draft_forward(
        self, step: DecodeStep, draft_input: EagleDraftInput, sampler: DraftSampler | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """What the modules have proposed, as a chain."""
        return *self._chain(step, draft_input.topk_index), draft_input.draft_probs

    def _propose(
        self, forward_batch: ForwardBatch, sampler: DraftSampler | None, output_positions: torch.Tensor | None
    ) -> tuple[LogitsProcessorOutput, torch.Tensor | None]:
        """Every module's proposals side by side, [bs, k], and their laws [bs, k, V]."""
        known = forward_batch.known_next_tokens
        forward_batch = replace(forward_batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        outputs, laws = [], []
        for module in range(self.speculative_num_steps):
            if module:
                tokens = outputs[-1].topk_index[:, 0]
                if known is not None:
                    tokens = torch.where(known[:, module] < 0, tokens, known[:, module])
                forward_batch = replace(
                    forward_batch,
                    input_ids=forward_batch.rotate_input_ids(tokens),
                    spec_info=EagleDraftInput(outputs[-1].hidden_states, module=module),
                )
            at = None if output_positions is None else output_positions + module
            output, law = super()._propose(forward_batch, sampler, at)
            outputs.append(output)
            laws.append(law)
        proposed = LogitsProcessorOutput(
            None,
            torch.cat([output.topk_p for output in outputs], dim=1),
            torch.cat([output.topk_index for output in outputs], dim=1),
        )
        return proposed, torch.stack(laws, dim=1) if sampler else None

    def forward_draft_extend(
        self, forward_batch: ForwardBatch, next_token_ids: torch.Tensor, *more: object
    ) -> EagleDraftInput:
        draft_input = super().forward_draft_extend(forward_batch, next_token_ids, *more)
        last, hidden_states = forward_batch.last_rows, forward_batch.hidden_states
        # What a short prompt does not have is somebody else's, and will not be looked at.
        rows = (last.unsqueeze(1) - self._column[: self.num_front_tokens].flip(0)).clamp(min=0)
        tokens = forward_batch.rotate_input_ids(next_token_ids)
        return replace(draft_input, front_tokens=tokens[rows], front_hidden=hidden_states[rows])

    def draft_extend_forward(
        self, step: DecodeStep, output: EagleVerifyOutput, sampler: DraftSampler | None = None
    ) -> EagleDraftInput:
        """Over the last k − 1 pairs before S too, or as many as there are, in front of the accepted ones."""
        paths, bs, width = output.paths, len(step.seq_lens), self.draft_extend_width()
        front, state = self.num_front_tokens, self.future_map.draft_state
        front_hidden = state["front_hidden"][step.req_pool_indices].flatten(0, 1)  # [bs · front, any]
        hidden_states = torch.cat([front_hidden, output.hidden_states])
        front_rows = torch.arange(len(front_hidden), device=self.device).view(bs, front)
        rows = torch.cat([front_rows, paths.rows.view(bs, -1) + bs * front], dim=1)  # [bs, width]
        tokens = torch.cat([state["front_tokens"][step.req_pool_indices], paths.tokens], dim=1)
        behind = paths.lens.unsqueeze(1) + self._column[:front]  # the front of the next round

        before = step.moved(-front)
        again = step.seq_lens - before.seq_lens  # [bs] less than `front` where the text is shorter
        lens, at = again + paths.lens, self._column + (front - again).unsqueeze(1)
        at = at.clamp(max=width - 1)
        slots = self.kernels.assign_extend_cache_locs(
            self._table(), step.req_pool_indices, before.seq_lens, width
        )
        paths = paths._replace(
            tokens=tokens.gather(1, at),
            rows=rows.gather(1, at).flatten(),
            slots=torch.where(self._column < lens.unsqueeze(1), slots, PADDING_SLOT).flatten(),
            positions=(before.seq_lens.unsqueeze(1) + self._column).flatten(),
            last_rows=self.first_rows(bs, width)[:-1] + (lens - 1).clamp(min=0),
        )
        draft_input = super().draft_extend_forward(
            before, replace(output, paths=paths, hidden_states=hidden_states), sampler
        )
        return replace(
            draft_input,
            front_tokens=tokens.gather(1, behind),
            front_hidden=hidden_states[rows.gather(1, behind)],
        )


class MultiLayerEagleWorkerV2(EAGLEWorkerV2):
    draft_worker_class = MultiLayerEagleDraftWorker

    def kv_lookahead(self) -> int:
        return self.speculative_num_steps

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Rounds alone: a prompt's modules are launched one by one."""
        BaseSpecWorker.init_cuda_graphs(self, graphs)
        self.round_graphs = EagleCudaGraphs(self, graphs)
