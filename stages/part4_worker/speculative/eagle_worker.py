"""One step of EAGLE: draft a tree, verify it in one target forward, bring the draft's KV up to date.

Restates sglang/srt/speculative/eagle_worker.py as of v0.4.6 (815dce0554, #2150, and what followed). To the
scheduler this is a worker like any other whose steps yield several tokens per request.

    draft                               draft model, steps − 1 forwards of topk rows per request
    verify                              target model, 1 forward of n rows per request under a tree mask
    forward_draft_extend_after_decode   draft model, 1 forward over the accepted tokens

The host waits once per step, at the end, in `commit`: by then all three phases are launched. What it waits
for is the end of the verification only, so it works while the draft extend runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.logprobs import LogprobRows, gather_logprobs
from ..managers.schedule_batch import ScheduleBatch
from ..managers.tp_worker import GenerationBatchResult, TpModelWorker
from ..mem_cache.memory_pool import PADDING_SLOT
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback, upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..server_args import ServerArgs
from .build_eagle_tree import Beams, DraftTree, column_bits
from .eagle_cuda_graphs import EagleCudaGraphs
from .eagle_info import (
    EagleDraftInput,
    EagleStep,
    EagleVerifyInput,
    EagleVerifyOutput,
    align_evict_mask_to_page_size,
)


class EAGLEWorker(TpModelWorker):
    """The draft model's worker, which borrows the target's: its own `model_runner` is the draft's."""

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        self.target_worker = target_worker
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.page_size = server_args.page_size
        self.moves_kv = self.topk > 1 and self.page_size > 1  # see _settle_accepted
        # A path has at most one node per level, and no more nodes than the tree.
        self.max_path = min(self.speculative_num_steps, self.speculative_num_draft_tokens - 1)
        vocab_size = target_worker.model_config.vocab_size
        if self.topk > vocab_size:
            raise ValueError(
                f"speculative_eagle_topk={self.topk} is more than the vocabulary's {vocab_size} tokens: "
                "lower it"
            )
        super().__init__(server_args, _draft_config(server_args, target_worker.model_config))
        self.draft_model_runner.model.set_embed_and_head(
            *target_worker.model_runner.model.get_embed_and_head()
        )
        self._column_bits = column_bits(self.draft_slots_per_req(), self.device)

    @property
    def draft_model_runner(self):
        return self.model_runner

    def max_slots_per_step(self) -> int:
        """The most slots a request takes in a step: drafting gives back its own before verifying takes."""
        return max(self.draft_slots_per_req(), self.speculative_num_draft_tokens)

    def rows_per_req(self) -> tuple[int, int, int]:
        """Rows of a decoding request in a forward of the draft loop, in verification, in the draft extend."""
        return self.topk, self.speculative_num_draft_tokens, self.max_path + 1

    def draft_slots_per_req(self) -> int:
        # The first level needs no forward: its tokens come out of the draft extend before it.
        return self.topk * (self.speculative_num_steps - 1)

    # ---- the scheduler's call ----

    def forward_batch_speculative_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step. A decode step leaves `batch` as if each request had decoded its accepted tokens."""
        if batch.forward_mode.is_extend():
            self._idle_while_others_draft(batch.global_step)
            forward_batch, result = self.forward_target_extend(batch)
            self.forward_draft_extend(batch, forward_batch, result.next_token_ids[:, 0])
            return result
        verify_input = self.draft(batch)
        verify_output = self.verify(batch, verify_input)
        self.forward_draft_extend_after_decode(batch, verify_input, verify_output)
        return self.commit(batch, verify_output)

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Record a round of each size: draft, verify, draft extend."""
        self.graphs = graphs
        self.round_graphs = EagleCudaGraphs(self, graphs)
        self.target_worker.model_runner.init_extend_graphs(graphs, CaptureHiddenMode.FULL)
        self.draft_model_runner.init_extend_graphs(graphs, CaptureHiddenMode.LAST, self.topk, is_draft=True)

    # ---- beside other ranks of DP attention ----

    def forward_idle(self, step: GlobalStep) -> None:
        """A step without requests, so that the gathers of the ranks that have some are whole."""
        size = self.graphs.padded_size(0, step)
        if size is not None:
            self.round_graphs.idle(size)
            return
        self._idle_while_others_draft(step)
        self.target_worker.model_runner.forward_idle(step.target_rows)
        self._forward_idle_draft(step.draft_extend_rows)

    def _idle_while_others_draft(self, step: GlobalStep) -> None:
        if step.draft_rows:
            for _ in range(self.speculative_num_steps - 1):
                self._forward_idle_draft(step.draft_rows)

    def _forward_idle_draft(self, dp_rows: int) -> None:
        runner = self.draft_model_runner
        hidden = torch.zeros(1, self.model_config.hidden_size, dtype=runner.dtype, device=self.device)
        runner.forward_idle(dp_rows, EagleDraftInput(hidden))

    # ---- prefill ----

    def forward_target_extend(self, batch: ScheduleBatch) -> tuple[ForwardBatch, GenerationBatchResult]:
        """An ordinary prefill that also keeps the hidden state of every token."""
        step = batch.get_model_worker_batch()
        step.capture_hidden_mode = CaptureHiddenMode.FULL
        forward_batch = ForwardBatch.init_new(step, self.target_worker.model_runner)
        return forward_batch, self.target_worker.forward_and_sample(step, forward_batch)

    def forward_draft_extend(
        self, batch: ScheduleBatch, forward_batch: ForwardBatch, next_token_ids: torch.Tensor
    ) -> None:
        """The draft over the same rows, each paired with the token after it: token p + 1 with hidden p."""
        shifted = forward_batch.input_ids.roll(-1)
        shifted[forward_batch.last_rows] = next_token_ids  # [bs]: sampled, or known where a prompt goes on
        draft_batch = forward_batch.for_runner(
            self.draft_model_runner,
            input_ids=shifted,
            spec_info=EagleDraftInput(forward_batch.hidden_states),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            input_logprobs=None,
            dp_rows=batch.global_step.draft_extend_rows,
        )
        batch.spec_info = self.capture_for_decode(
            self.draft_model_runner.forward(draft_batch), next_token_ids
        )

    def capture_for_decode(
        self, logits_output: LogitsProcessorOutput, verified_id: torch.Tensor
    ) -> EagleDraftInput:
        """The draft state that the next step starts from."""
        return EagleDraftInput(logits_output.hidden_states, verified_id, *self._propose(logits_output))

    # ---- draft ----

    def draft(self, batch: ScheduleBatch) -> EagleVerifyInput:
        """Grow a tree of drafts behind every request's last token and choose the nodes to verify."""
        arrays = self._allocate(batch)
        size = self.graphs.padded_size(batch.batch_size(), batch.global_step)
        if size is not None:
            return self.round_graphs.draft(size, arrays, batch.spec_info)
        step = EagleStep(*upload(self.device, *arrays), batch.seq_lens, batch.global_step)
        return self.draft_forward(step, batch.spec_info)

    def _allocate(self, batch: ScheduleBatch) -> tuple[np.ndarray, ...]:
        """Slots for every beam that is run, taken back at once, then slots to verify in: often the same ones.

        The drafts' KV is scratch and dead when verification begins, so nothing has to wait: the host
        takes both allocations first and sends all a step needs, the fields of EagleStep, in one upload.
        """
        allocator = batch.token_to_kv_pool_allocator
        backup = allocator.backup_state()
        draft_slots = batch.alloc_decode_slots(self.draft_slots_per_req())
        allocator.restore_state(backup)
        batch.out_cache_loc = batch.alloc_decode_slots(self.speculative_num_draft_tokens)
        return (
            batch.req_pool_indices,
            batch.seq_lens,
            batch.output_positions(),
            draft_slots,
            batch.out_cache_loc,
        )

    def draft_forward(self, step: EagleStep, draft_input: EagleDraftInput) -> EagleVerifyInput:
        """The device's part of drafting."""
        if self.draft_slots_per_req():
            self._enter_slots(step, step.draft_slots)
        tree = self._grow(step, draft_input)
        selected, tokens, parents = tree.select(self.speculative_num_draft_tokens - 1, self.kernels)
        built = self.kernels.build_tree(selected, parents, self.topk, step.seq_lens)
        draft_token = torch.cat([draft_input.verified_id[:, None], tokens], dim=1)  # [bs, n]
        return EagleVerifyInput(step, draft_token, *built)

    def _enter_slots(self, step: EagleStep, slots: torch.Tensor) -> None:
        """Write `slots` [bs, width] into the table of requests, from position S on."""
        widths = torch.full_like(step.seq_lens, slots.shape[1])
        table = self.draft_model_runner.req_to_token_pool.req_to_token
        self.kernels.assign_req_to_token(table, step.req_pool_indices, step.seq_lens, slots, widths)

    def _grow(self, step: EagleStep, draft_input: EagleDraftInput) -> DraftTree:
        """`steps` levels in steps − 1 forwards; each beam attends to its own ancestors."""
        tree = DraftTree(self.topk)
        beams = tree.first_level(draft_input.topk_p, draft_input.topk_index, draft_input.hidden_states)
        ancestors = plan = None  # the attention backend's one plan serves all levels
        for level in range(self.speculative_num_steps - 1):
            bits = self._column_bits[level * self.topk : (level + 1) * self.topk]  # [topk, words]
            ancestors = self._ancestor_mask(ancestors, beams, bits)
            forward_batch = self._draft_batch(step, beams, ancestors, level, plan)
            logits_output = self.draft_model_runner.forward(forward_batch)
            plan = forward_batch.attn_metadata
            proposals = self._propose(logits_output)
            if level < self.speculative_num_steps - 2:
                beams = tree.next_level(beams, *proposals, logits_output.hidden_states, self.kernels)
            else:
                tree.last_level(beams, *proposals)
        return tree

    def _ancestor_mask(self, parents: torch.Tensor | None, beams: Beams, own: torch.Tensor) -> torch.Tensor:
        """Each beam sees its parent's ancestors and itself: [bs, topk, words].

        A beam's KV stays where it was written when the tree grows on from another beam, so who sees
        what must follow the tree. (Upstream lets a beam see whatever stood in its column.)
        """
        if parents is None:
            return own.expand(len(beams.scores), -1, -1)
        index = beams.parent_beam[:, :, None].expand(-1, -1, parents.shape[-1])
        return parents.gather(1, index) | own

    def _draft_batch(
        self, step: EagleStep, beams: Beams, ancestors: torch.Tensor, level: int, plan: Any
    ) -> ForwardBatch:
        first = level * self.topk
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=beams.input_ids.flatten(),
            # Pair (token p + 1, hidden p) stands at p, so the first drafted token, at S + 1, stands at S.
            positions=(step.seq_lens + level).repeat_interleave(self.topk),
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            seq_lens=step.seq_lens + (first + self.topk),
            out_cache_loc=step.draft_slots[:, first : first + self.topk].flatten(),
            q_start_loc=step.first_rows(self.topk),
            max_q_len=self.topk,
            attn_backend=self.draft_model_runner.attn_backend,
            seq_lens_cpu=step.planned(self.draft_slots_per_req()),
            attn_metadata=plan,
            tree_mask=ancestors,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            topk=self.topk,
            spec_info=EagleDraftInput(beams.hidden_states.flatten(0, 1)),
            dp_rows=step.global_step.draft_rows,
        )

    def _propose(self, logits_output: LogitsProcessorOutput) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and ids of the topk likeliest next tokens, [rows, topk] each."""
        # A draft that yields NaN proposes badly; it must not break the tree's order.
        return logits_output.topk_p.nan_to_num(0.0), logits_output.topk_index

    # ---- verify ----

    def verify(self, batch: ScheduleBatch, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        """One target forward over all nodes, then each request's path, its KV put where it is looked for."""
        greedy = batch.sampling_info.is_plain_greedy and not batch.return_logprob
        size = self.graphs.padded_size(batch.batch_size(), batch.global_step)
        if size is None:
            return self.verify_forward(verify_input, greedy, batch)
        if greedy and not batch.return_hidden_states:
            return self.round_graphs.verify(size)
        return self.round_graphs.verify_with_logits(size, verify_input, batch)

    def verify_forward(
        self, verify_input: EagleVerifyInput, greedy: bool, batch: ScheduleBatch | None
    ) -> EagleVerifyOutput:
        """The device's part of verifying. `batch` may be None for a greedy batch that wants nothing else."""
        logits_output = self.target_forward(verify_input, topk=1 if greedy else None)
        return self.accept(verify_input, logits_output, batch)

    def target_forward(self, verify_input: EagleVerifyInput, topk: int | None) -> LogitsProcessorOutput:
        step, n = verify_input.step, self.speculative_num_draft_tokens
        self._enter_slots(step, step.verify_slots)
        target = self.target_worker.model_runner
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=verify_input.draft_token.flatten(),
            positions=verify_input.positions,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            seq_lens=step.seq_lens + n,
            out_cache_loc=step.verify_slots.flatten(),
            q_start_loc=step.first_rows(n),
            max_q_len=n,
            attn_backend=target.attn_backend,
            seq_lens_cpu=step.planned(n),
            tree_mask=verify_input.tree_mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            topk=topk,
            dp_rows=step.global_step.target_rows,
        )
        return target.forward(forward_batch)

    def accept(
        self,
        verify_input: EagleVerifyInput,
        logits_output: LogitsProcessorOutput,
        batch: ScheduleBatch | None,
        readback: Readback | None = None,
    ) -> EagleVerifyOutput:
        """Choose the paths, settle their KV, and send what the host must know on its way."""
        output = verify_input.accept(
            logits_output,
            None if batch is None else batch.sampling_info,
            self.max_path,
            self.server_args.speculative_accept_threshold_single,
            self.server_args.speculative_accept_threshold_acc,
            self.kernels,
        )
        if batch is not None:
            batch.sampling_info.append_tokens(output.tokens, output.accept_length + 1)
        self._settle_accepted(verify_input.step, output)
        rows, n = output.rows, self.speculative_num_draft_tokens
        output.hidden_states = logits_output.hidden_states
        output.result = GenerationBatchResult(
            next_token_ids=output.tokens,
            is_finite=(output.is_finite[rows] | ~output.accepted).all(dim=-1),
            accept_index=torch.where(output.accepted, rows % n, -1),
            logprobs=None if batch is None else self._score(batch, logits_output.next_token_logits, output),
            hidden_states=logits_output.hidden_states[rows.flatten()].float()
            if batch is not None and batch.return_hidden_states
            else None,
        ).start_read(readback)
        return output

    def _settle_accepted(self, step: EagleStep, output: EagleVerifyOutput) -> None:
        """Make positions S … S + accept_length name the accepted nodes' KV.

        A chain's path is its first nodes already. In a tree with single-token pages the table is
        pointed at the path's slots; with larger ones position fixes the slot, so the KV moves.
        """
        slots = step.verify_slots.flatten()[output.rows]  # [bs, width]
        if self.moves_kv:
            moved = step.verify_slots[:, : slots.shape[1]]
            destination = torch.where(output.accepted, moved, PADDING_SLOT).flatten()
            source = torch.where(output.accepted, slots, PADDING_SLOT).flatten()
            self.target_worker.model_runner.token_to_kv_pool.move_kv_cache(destination, source)
            slots = moved
        elif self.topk > 1:
            table = self.draft_model_runner.req_to_token_pool.req_to_token
            lens = output.accept_length + 1
            self.kernels.assign_req_to_token(table, step.req_pool_indices, step.seq_lens, slots, lens)
        output.slots = torch.where(output.accepted, slots, PADDING_SLOT)

    # ---- draft extend ----

    def forward_draft_extend_after_decode(
        self, batch: ScheduleBatch, verify_input: EagleVerifyInput, output: EagleVerifyOutput
    ) -> None:
        """Rewrite the draft's KV at accepted positions from true hidden states; propose the next tokens."""
        size = self.graphs.padded_size(batch.batch_size(), batch.global_step)
        if size is not None:
            batch.spec_info = self.round_graphs.draft_extend(size, batch.batch_size())
        else:
            batch.spec_info = self.draft_extend_forward(verify_input.step, output)

    def draft_extend_forward(self, step: EagleStep, output: EagleVerifyOutput) -> EagleDraftInput:
        """The device's part of the draft extend.

        Every request gets `width` rows, whatever it accepted, so that nothing has to be read back;
        rows behind its path write to the padding slot and are seen by nobody.
        """
        width = output.rows.shape[1]
        column = torch.arange(width, device=self.device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            input_ids=output.tokens.flatten(),
            positions=(step.seq_lens[:, None] + column).flatten(),
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            seq_lens=step.seq_lens + output.accept_length + 1,
            out_cache_loc=output.slots.flatten(),
            q_start_loc=step.first_rows(width),
            max_q_len=width,
            attn_backend=self.draft_model_runner.attn_backend,
            seq_lens_cpu=step.planned(width),
            last_rows=step.first_rows(width)[:-1] + output.accept_length,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            spec_info=EagleDraftInput(output.hidden_states[output.rows.flatten()]),
            dp_rows=step.global_step.draft_extend_rows,
        )
        verified_id = output.tokens.gather(1, output.accept_length[:, None])[:, 0]
        return self.capture_for_decode(self.draft_model_runner.forward(forward_batch), verified_id)

    # ---- the host catches up ----

    def commit(self, batch: ScheduleBatch, output: EagleVerifyOutput) -> GenerationBatchResult:
        """Read the step's result, append what each request accepted up to its end, free the other slots."""
        bs, n = len(batch.reqs), self.speculative_num_draft_tokens
        table = batch.req_to_token_pool.req_to_token_host
        # Indices into flat arrays, since numpy takes several times as long over pairs of them. What needs no
        # result comes first: the device is still at work.
        columns = np.arange(self.max_path + 1)
        first_nodes = np.arange(0, bs * n, n)[:, None]
        places = (batch.req_pool_indices * table.shape[1] + batch.seq_lens)[:, None] + columns
        evict_mask = np.ones(bs * n, dtype=bool)
        result = output.result.read()
        accept_index = result.accept_index[:bs]
        counts = []
        for i, req in enumerate(batch.reqs):
            count, accepted = req.take(result, i), len(result.tokens[i])
            if count < accepted:
                accept_index[i, count:] = -1  # behind the request's end
            req.kv_len += count
            req.count_round(proposed=n - 1, correct=min(count, accepted - 1))
            counts.append(count)
        kept = np.array(counts)
        is_kept = accept_index >= 0  # [bs, max_path + 1]
        nodes = (first_nodes + (columns if self.moves_kv else accept_index))[is_kept]
        table.reshape(-1)[places[is_kept]] = batch.out_cache_loc.reshape(-1)[nodes]
        evict_mask[nodes] = False
        evict_mask = evict_mask.reshape(bs, n)
        if self.page_size > 1:
            evict_mask = align_evict_mask_to_page_size(batch.seq_lens, kept, evict_mask, self.page_size)
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc[evict_mask])
        batch.seq_lens = batch.seq_lens + kept
        return result

    def _score(
        self, batch: ScheduleBatch, logits: torch.Tensor, output: EagleVerifyOutput
    ) -> LogprobRows | None:
        if not batch.return_logprob:
            return None
        top_num, token_ids = batch.logprob_shape()
        (token_ids,) = upload(self.device, token_ids.repeat(output.rows.shape[1], axis=0))
        return gather_logprobs(
            logits[output.rows.flatten()], output.tokens.flatten(), top_num, token_ids, self.kernels
        )


def _draft_config(server_args: ServerArgs, target: ModelConfig) -> ModelConfig:
    """The head's config, read as the target needs it.

    Raises:
        ValueError: the head was made for another target.
    """
    config = ModelConfig.from_path(
        server_args.speculative_draft_model_path, target.context_len, is_draft_model=True
    )
    for name, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise ValueError(
                f"the draft head {config.path} has {what} {own}, the target {target.path} {wanted}: "
                "a head works only with the target it was trained for"
            )
    return dataclasses.replace(config, torch_dtype=target.torch_dtype)
