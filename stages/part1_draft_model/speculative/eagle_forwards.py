"""The forwards of a round of EAGLE: what the device does in each phase.

Restates sglang/srt/speculative/eagle_worker.py as of v0.4.6 (#2150 and what followed), as far as
it runs models. Nothing here allocates, frees or reads back: around it, the host does.
"""

from __future__ import annotations

import torch

from ..configs.model_config import draft_config
from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.generation_result import GenerationBatchResult
from ..managers.schedule_batch import ScheduleBatch
from ..managers.tp_worker import TpModelWorker
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..server_args import ServerArgs
from .eagle_info import EagleDraftInput, EagleStep, EagleVerifyInput, EagleVerifyOutput


class EagleForwards(TpModelWorker):
    """The draft model's worker, which borrows the target's: its own `model_runner` is the draft's."""

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        self.target_worker = target_worker
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        config = draft_config(server_args.speculative_draft_model_path, target_worker.model_config)
        super().__init__(server_args, config)
        self.draft_model_runner.model.set_embed_and_head(
            *target_worker.model_runner.model.get_embed_and_head()
        )

    @property
    def draft_model_runner(self):
        return self.model_runner

    # ---- prefill ----

    def forward_target_extend(self, batch: ScheduleBatch) -> tuple[ForwardBatch, GenerationBatchResult]:
        """An ordinary prefill that also keeps the hidden state of every token."""
        step = batch.get_model_worker_batch()
        step.capture_hidden_mode = CaptureHiddenMode.FULL
        forward_batch = ForwardBatch.init_new(step, self.target_worker.model_runner)
        return forward_batch, self.target_worker.forward_and_sample(step, forward_batch)

    def forward_draft_extend(
        self, forward_batch: ForwardBatch, next_token_ids: torch.Tensor
    ) -> EagleDraftInput:
        """The draft over the same rows, each paired with the token after it: token p + 1 with hidden p."""
        shifted = forward_batch.input_ids.roll(-1)
        shifted[forward_batch.last_rows] = next_token_ids  # [bs]: sampled, or known where a prompt goes on
        draft_batch = forward_batch.for_runner(
            self.draft_model_runner,
            input_ids=shifted,
            spec_info=EagleDraftInput(forward_batch.hidden_states),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=1,
            input_logprobs=None,
        )
        return self.capture_for_decode(self.draft_model_runner.forward(draft_batch), next_token_ids)

    def capture_for_decode(
        self, logits_output: LogitsProcessorOutput, verified_id: torch.Tensor
    ) -> EagleDraftInput:
        """The draft state that the next step starts from."""
        return EagleDraftInput(
            logits_output.hidden_states, verified_id, logits_output.topk_p, logits_output.topk_index
        )

    # ---- draft ----

    def start_round(self, batch: ScheduleBatch) -> EagleStep:
        """Send what a round needs in one upload."""
        arrays = (
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens + 1 - batch.prompt_lens,
            batch.out_cache_loc,
            batch.seq_lens + self.speculative_num_draft_tokens,
        )
        return EagleStep(*upload(self.device, *arrays), batch.seq_lens)

    def draft_forward(self, step: EagleStep, draft_input: EagleDraftInput) -> EagleVerifyInput:
        """The device's part of drafting: `steps` tokens, the first of which came out of the draft extend."""
        self.kernels.assign_req_to_token(
            self.draft_model_runner.req_to_token_pool.req_to_token,
            step.req_pool_indices,
            step.seq_lens,
            step.verify_slots,
        )
        tokens, hidden_states = (
            [draft_input.verified_id, draft_input.topk_index[:, 0]],
            draft_input.hidden_states,
        )
        for level in range(self.speculative_num_steps - 1):
            forward_batch = self._draft_batch(step, level, tokens[-1], hidden_states)
            output = self.draft_model_runner.forward(forward_batch)
            tokens.append(output.topk_index[:, 0])
            hidden_states = output.hidden_states
        return EagleVerifyInput(step, torch.stack(tokens, dim=1))

    def _draft_batch(
        self, step: EagleStep, level: int, input_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> ForwardBatch:
        """One draft of each chain. Its pair (token p + 1, hidden p) stands at p, so the first draft at S."""
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens + level,
            q_start_loc=self.first_rows(len(step.seq_lens), 1),
            max_q_len=1,
            attn_backend=self.draft_model_runner.attn_backend,
            input_ids=input_ids,
            positions=step.seq_lens + level,
            seq_lens=step.seq_lens + level + 1,
            out_cache_loc=step.verify_slots[:, level].contiguous(),
            seq_lens_cpu=step.planned(level + 1),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            topk=1,
            spec_info=EagleDraftInput(hidden_states),
        )

    # ---- verify ----

    def verify(self, batch: ScheduleBatch, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        """One target forward over all chains, then how far it agrees with each."""
        greedy = batch.sampling_info.is_plain_greedy
        logits_output = self.target_forward(verify_input, topk=1 if greedy else None)
        return self.accept(verify_input, logits_output, batch)

    def target_forward(self, verify_input: EagleVerifyInput, topk: int | None) -> LogitsProcessorOutput:
        """The target over all chains: its logits, or with `topk` only the likeliest tokens behind each."""
        step, n = verify_input.step, self.speculative_num_draft_tokens
        target = self.target_worker.model_runner
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.first_rows(len(step.seq_lens), n),
            max_q_len=n,
            attn_backend=target.attn_backend,
            input_ids=verify_input.draft_token.flatten(),
            positions=verify_input.positions,
            seq_lens=step.verify_lens,
            out_cache_loc=step.verify_slots.flatten(),
            seq_lens_cpu=step.planned(n),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            topk=topk,
        )
        return target.forward(forward_batch)

    def accept(
        self, verify_input: EagleVerifyInput, logits_output: LogitsProcessorOutput, batch: ScheduleBatch
    ) -> EagleVerifyOutput:
        """Choose each request's path, and start sending it to the host."""
        paths = verify_input.accept(logits_output, batch.sampling_info, self.kernels)
        hidden_states = logits_output.hidden_states
        result = GenerationBatchResult(
            next_token_ids=paths.tokens,
            is_finite=paths.is_finite,
            accept_index=paths.nodes,
            hidden_states=hidden_states.float() if batch.return_hidden_states else None,
        )
        result.start_read()
        return EagleVerifyOutput(paths, hidden_states, result)

    # ---- draft extend ----

    def forward_draft_extend_after_decode(
        self, verify_input: EagleVerifyInput, output: EagleVerifyOutput
    ) -> EagleDraftInput:
        """Rewrite the draft's KV at accepted positions from true hidden states; propose the next tokens.

        It runs over the rows of the verification. Every request has all n of them, whatever it accepted, so
        that nothing has to be read back; rows behind its path are seen by nobody.
        """
        step, width, paths = verify_input.step, self.speculative_num_draft_tokens, output.paths
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.first_rows(len(step.seq_lens), width),
            max_q_len=width,
            attn_backend=self.draft_model_runner.attn_backend,
            input_ids=paths.tokens.flatten(),
            positions=verify_input.positions,
            seq_lens=paths.kv_lens,
            out_cache_loc=step.verify_slots.flatten(),
            seq_lens_cpu=step.planned(width),
            last_rows=paths.last_rows,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=1,
            spec_info=EagleDraftInput(output.hidden_states),
        )
        return self.capture_for_decode(self.draft_model_runner.forward(forward_batch), paths.verified_id)
