"""The forwards of a round of EAGLE: what the device does in each phase.

Restates sglang/srt/speculative/eagle_worker.py as of v0.4.6 (#2150 and what followed), as far as
it runs models. Nothing here allocates, frees or reads back: around it, the host does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configs.model_config import draft_config
from ..kernels.tree_types import AcceptedPaths
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.logprobs import LogprobRows, gather_logprobs
from ..managers.generation_result import GenerationBatchResult
from ..managers.schedule_batch import ScheduleBatch
from ..managers.tp_worker import TpModelWorker
from ..mem_cache.memory_pool import PADDING_SLOT
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback, upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..server_args import ServerArgs
from .build_eagle_tree import DraftTree, column_bits
from .eagle_cuda_graphs import EagleCudaGraphs
from .eagle_info import EagleDraftInput, EagleStep, EagleVerifyInput, EagleVerifyOutput
from .spec_info import SpeculativeAlgorithm
from .token_map import load_token_map


class EagleForwards(TpModelWorker):
    """The draft model's worker, which borrows the target's: its own `model_runner` is the draft's."""

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        self.target_worker = target_worker
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.moves_kv = self.topk > 1 and server_args.page_size > 1  # see _settle_accepted
        # A path has at most one node per level, and no more nodes than the tree.
        self.max_path = min(self.speculative_num_steps, self.speculative_num_draft_tokens - 1)
        algorithm = server_args.speculative_algorithm
        target = target_worker.model_runner.model
        config = draft_config(server_args.speculative_draft_model_path, target_worker.model_config, algorithm)
        super().__init__(server_args, config)
        self._share_with(target, SpeculativeAlgorithm.from_string(algorithm))
        # What never changes is made once: in a graph each small tensor costs as much as a launch.
        self._column_bits = column_bits(self.draft_slots_per_req(), self.device)
        requests = torch.arange(server_args.max_running_requests, device=self.device)
        self._request_of_beam = requests.repeat_interleave(self.topk)

    def _share_with(self, target: nn.Module, algorithm: SpeculativeAlgorithm) -> None:
        """Have the draft model borrow from the target, and the target capture what the draft reads.

        Raises:
            ValueError: the target or the token map does not fit, or more children are asked for than tokens.
        """
        draft = self.draft_model_runner.model
        embed, head = target.get_embed_and_head()
        if algorithm.is_eagle3():
            target.set_eagle3_layers_to_capture(self.model_config.aux_layer_ids)
            draft.set_embed(embed)
        elif (path := self.server_args.speculative_token_map) is not None:
            draft.hot_token_id = load_token_map(path, len(head)).to(head.device)
            draft.set_embed_and_head(embed, head[draft.hot_token_id])
        else:
            draft.set_embed_and_head(embed, head)
        if self.topk > len(draft.lm_head):
            raise ValueError(
                f"speculative_eagle_topk={self.topk} is more than the {len(draft.lm_head)} tokens of the "
                "draft's vocabulary: lower it"
            )

    @property
    def draft_model_runner(self):
        return self.model_runner

    def draft_slots_per_req(self) -> int:
        # The first level needs no forward: its tokens come out of the draft extend before it.
        return self.topk * (self.speculative_num_steps - 1)

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Record a round of each size: draft, verify, draft extend."""
        self.graphs = graphs
        self.round_graphs = EagleCudaGraphs(self, graphs)
        self.target_worker.model_runner.init_extend_graphs(graphs, CaptureHiddenMode.FULL)
        self.draft_model_runner.init_extend_graphs(graphs, CaptureHiddenMode.LAST, self.topk, is_draft=True)

    def _table(self) -> torch.Tensor:
        return self.draft_model_runner.req_to_token_pool.req_to_token

    # ---- prefill ----

    def forward_target_extend(self, batch: ScheduleBatch) -> tuple[ForwardBatch, GenerationBatchResult]:
        """An ordinary prefill that also keeps the hidden state of every token."""
        step = batch.get_model_worker_batch()
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
        return EagleDraftInput(
            logits_output.hidden_states, verified_id, logits_output.topk_p, logits_output.topk_index
        )

    # ---- draft ----

    def draft_forward(self, step: EagleStep, draft_input: EagleDraftInput) -> EagleVerifyInput:
        """The device's part of drafting: `steps` levels, the first of which came out of the draft extend."""
        tree = DraftTree(
            draft_input.topk_p,
            draft_input.topk_index,
            self._request_of_beam[: len(step.seq_lens) * self.topk],
            self._column_bits,
            self.kernels,
        )
        levels = self.kernels.assign_draft_cache_locs(
            self._table(), step.req_pool_indices, step.seq_lens, step.draft_slots, self.topk
        )
        proposals = plan = None  # the attention backend's one plan serves all levels
        for level in zip(*levels, strict=True):
            if proposals is not None:
                tree.grow(proposals)
            before = draft_input if proposals is None else proposals
            forward_batch = self._draft_batch(step, tree, before.hidden_states, plan, *level)
            proposals, plan = self.draft_model_runner.forward(forward_batch), forward_batch.attn_metadata
        n = self.speculative_num_draft_tokens
        built = tree.build(proposals, draft_input.verified_id, step.seq_lens, n)
        return EagleVerifyInput(step, *built)

    def _draft_batch(
        self,
        step: EagleStep,
        tree: DraftTree,
        hidden_states: torch.Tensor,
        plan: Any,
        out_cache_loc: torch.Tensor,
        positions: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> ForwardBatch:
        """The beams of one level. Their pairs (token p + 1, hidden p) stand at p, so the first draft at S."""
        beams = tree.beams
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.first_rows(len(step.seq_lens), self.topk),
            max_q_len=self.topk,
            attn_backend=self.draft_model_runner.attn_backend,
            input_ids=beams.input_ids.flatten(),
            positions=positions,
            seq_lens=kv_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_cpu=step.planned(self.draft_slots_per_req()),
            attn_metadata=plan,
            tree_mask=beams.ancestors,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            topk=self.topk,
            spec_info=EagleDraftInput(hidden_states, hidden_rows=beams.hidden_rows.flatten()),
            dp_rows=step.global_step.draft_rows,
        )

    # ---- verify ----

    def verify(self, batch: ScheduleBatch, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        """One target forward over all nodes, then each request's path, its KV put where it is looked for."""
        greedy = batch.sampling_info.is_plain_greedy and not batch.return_logprob
        size = self.graphs.padded_size(batch.batch_size(), batch.global_step)
        if size is None:
            logits_output = self.target_forward(verify_input, topk=1 if greedy else None)
            return self.accept(verify_input, logits_output, batch)
        if greedy and not batch.return_hidden_states:
            return self.round_graphs.verify(size)
        return self.round_graphs.verify_with_logits(size, verify_input, batch)

    def target_forward(self, verify_input: EagleVerifyInput, topk: int | None) -> LogitsProcessorOutput:
        """The target over all nodes: its logits, or with `topk` only the likeliest tokens of each."""
        step, n = verify_input.step, self.speculative_num_draft_tokens
        self.kernels.assign_req_to_token(
            self._table(), step.req_pool_indices, step.seq_lens, step.verify_slots
        )
        target = self.target_worker.model_runner
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
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
        """Choose the paths, settle their KV, and send what the host must know on its way.

        `batch` is None in a graph: its requests are greedy and want tokens alone.
        """
        paths = verify_input.accept(
            logits_output,
            None if batch is None else batch.sampling_info,
            self.max_path,
            self.server_args.speculative_accept_threshold_single,
            self.server_args.speculative_accept_threshold_acc,
            self.kernels,
        )
        if batch is not None:
            batch.sampling_info.append_tokens(paths.tokens, paths.lens)
        hidden_states = logits_output.hidden_states
        returns_hidden = batch is not None and batch.return_hidden_states
        result = GenerationBatchResult(
            next_token_ids=paths.tokens,
            is_finite=paths.is_finite,
            accept_index=paths.nodes,
            logprobs=None if batch is None else self._score(batch, logits_output.next_token_logits, paths),
            hidden_states=hidden_states[paths.rows].float() if returns_hidden else None,
        )
        result.start_read(readback)
        paths = self._settle_accepted(verify_input.step, paths)
        return EagleVerifyOutput(paths, hidden_states, result)

    def _settle_accepted(self, step: EagleStep, paths: AcceptedPaths) -> AcceptedPaths:
        """Make positions S … S + lens − 1 name the accepted nodes' KV.

        A chain's path is its first nodes already. In a tree with single-token pages the table is
        pointed at the path's slots; with larger ones position fixes the slot, so the KV moves.
        """
        if self.moves_kv:
            slots = torch.where(paths.nodes >= 0, step.verify_slots[:, : self.max_path + 1], PADDING_SLOT)
            self.target_worker.model_runner.token_to_kv_pool.move_kv_cache(slots.flatten(), paths.slots)
            return paths._replace(slots=slots.flatten())
        if self.topk > 1:
            slots = paths.slots.view(paths.nodes.shape)
            self.kernels.assign_req_to_token(
                self._table(), step.req_pool_indices, step.seq_lens, slots, paths.lens
            )
        return paths

    def _score(self, batch: ScheduleBatch, logits: torch.Tensor, paths: AcceptedPaths) -> LogprobRows | None:
        if not batch.return_logprob:
            return None
        top_num, token_ids = batch.logprob_shape()
        (token_ids,) = upload(self.device, token_ids.repeat(self.max_path + 1, axis=0))
        return gather_logprobs(logits[paths.rows], paths.tokens.flatten(), top_num, token_ids, self.kernels)

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

    def draft_extend_forward(
        self, step: EagleStep, output: EagleVerifyOutput, out: EagleDraftInput | None = None
    ) -> EagleDraftInput:
        """The device's part of the draft extend; what the model computes is written to `out`, if given.

        Every request gets `width` rows, whatever it accepted, so that nothing has to be read back;
        rows behind its path write to the padding slot and are seen by nobody.
        """
        width, paths = self.max_path + 1, output.paths
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.first_rows(len(step.seq_lens), width),
            max_q_len=width,
            attn_backend=self.draft_model_runner.attn_backend,
            input_ids=paths.tokens.flatten(),
            positions=paths.positions,
            seq_lens=paths.kv_lens,
            out_cache_loc=paths.slots,
            seq_lens_cpu=step.planned(width),
            last_rows=paths.last_rows,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            output=out and LogitsProcessorOutput(None, out.topk_p, out.topk_index, out.hidden_states),
            spec_info=EagleDraftInput(output.hidden_states, hidden_rows=paths.rows),
            dp_rows=step.global_step.draft_extend_rows,
        )
        return self.capture_for_decode(self.draft_model_runner.forward(forward_batch), paths.verified_id)
