"""One step of EAGLE: draft a tree, verify it in one target forward, bring the draft's KV up to date.

Restates sglang/srt/speculative/eagle_worker_v2.py. Three phases are launched one behind the other:

    draft                               draft model, steps − 1 forwards of topk rows per request
    verify                              target model, 1 forward of n rows per request under a tree mask
    forward_draft_extend_after_decode   draft model, 1 forward of a fixed width over the accepted tokens

The first reads the future map, the last writes to it; lengths are published in between. So the host waits
nowhere, unless attention is planned on it: what was accepted it learns from the result, one step later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configs.model_config import draft_config
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.generation_result import GenerationBatchResult
from ..managers.overlap_utils import DecodeStep, FutureMap, OnPublish
from ..managers.schedule_batch import ModelWorkerBatch
from ..managers.tp_worker import TpModelWorker
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..sampling.sampling_batch_info import SamplingBatchInfo
from ..server_args import ServerArgs
from .base_spec_worker import BaseSpecWorker
from .build_eagle_tree import DraftTree, chain_links, column_bits
from .draft_sampler import DraftSampler
from .eagle_cuda_graphs import EagleCudaGraphs
from .eagle_info import EagleDraftInput, EagleVerifyInput, EagleVerifyOutput
from .spec_info import SpeculativeAlgorithm
from .token_map import load_token_map


class EagleDraftWorker(TpModelWorker):
    """The draft model, with the target's embedding and head."""

    # How many entries more than the target's S a request's draft KV has between steps. The pair at S − 1 has
    # the last output token in it; a draft that reads tokens alone has one entry more for that token.
    kv_ahead = 0
    # How many of the pairs before S the draft extend runs once more.
    num_front_tokens = 0

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        self.topk = server_args.speculative_eagle_topk
        algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
        target = target_worker.model_runner.model
        # A method that builds on this one has a name of its own.
        path, kind = server_args.speculative_draft_model_path, self._kind(algorithm)
        num_modules = server_args.speculative_num_steps if server_args.enable_multi_layer_eagle else None
        super().__init__(server_args, draft_config(path, target_worker.model_config, kind, num_modules))
        self._share_with(target, algorithm)
        if self.topk > (tokens := len(self.model_runner.model.lm_head)):
            raise ValueError(
                f"speculative_eagle_topk={self.topk} is more than the {tokens} tokens of the draft's "
                "vocabulary: lower it"
            )
        # What never changes is made once: in a graph each small tensor costs as much as a launch.
        requests = torch.arange(server_args.max_running_requests, device=self.device)
        self._request_of_beam = requests.repeat_interleave(self.topk)
        self.set_shape(server_args.speculative_num_steps, server_args.speculative_num_draft_tokens)

    def set_shape(self, num_steps: int, num_draft_tokens: int) -> None:
        """What a round looks like: levels of its trees, and nodes of them to verify, the root included."""
        self.speculative_num_steps = num_steps
        self.speculative_num_draft_tokens = num_draft_tokens
        # A path has at most one node per level, and no more nodes than the tree.
        self.max_path = min(num_steps, num_draft_tokens - 1)
        self._column_bits = column_bits(self.draft_slots_per_req(), self.device)
        self._chain_links = chain_links(self.server_args.max_running_requests, num_draft_tokens, self.device)

    def init_future_map(self, future_map: FutureMap) -> None:
        """What a round leaves to the next."""
        super().init_future_map(future_map)
        config, dtype = self.model_config, self.model_runner.dtype
        hidden_size = config.hidden_size if config.fed_hidden_size else 0  # its own, from the second level on
        EagleDraftInput.init_future_map(future_map, self.topk, hidden_size, dtype)
        if self.server_args.speculative_use_rejection_sampling:
            future_map.add_draft_state("draft_probs", (config.vocab_size,), torch.float32)

    def _kind(self, algorithm: SpeculativeAlgorithm) -> str:
        """Which of draft_config's kinds of draft this is."""
        return "EAGLE3" if algorithm.is_eagle3() else "EAGLE"

    def _share_with(self, target: nn.Module, algorithm: SpeculativeAlgorithm) -> None:
        """Have the draft model borrow from the target, and the target capture what the draft reads.

        Raises:
            ValueError: the target or the token map does not fit.
        """
        draft = self.model_runner.model
        embed, head = target.get_embed_and_head()
        if algorithm.is_eagle3():
            target.set_eagle3_layers_to_capture(self.model_config.aux_layer_ids)
            draft.set_embed(embed)
        elif (path := self.server_args.speculative_token_map) is not None:
            draft.hot_token_id = load_token_map(path, len(head)).to(head.device)
            draft.set_embed_and_head(embed, head[draft.hot_token_id])
        else:
            draft.set_embed_and_head(embed, head)

    def draft_slots_per_req(self) -> int:
        # The first level needs no forward: its tokens come out of the draft extend before it.
        return self.topk * max(self.speculative_num_steps - 1, 0)

    def draft_extend_width(self) -> int:
        return self.num_front_tokens + self.max_path + 1

    def _table(self) -> torch.Tensor:
        return self.model_runner.req_to_token_pool.req_to_token

    # ---- prefill ----

    def forward_draft_extend(
        self,
        forward_batch: ForwardBatch,
        next_token_ids: torch.Tensor,
        dp_rows: int | None,
        sampler: DraftSampler | None = None,
        output_positions: torch.Tensor | None = None,
    ) -> EagleDraftInput:
        """The draft over the same rows, each paired with the token after it: token p + 1 with hidden p."""
        draft_batch = forward_batch.for_runner(
            self.model_runner,
            # The last of them is sampled, or known where a prompt goes on.
            input_ids=forward_batch.rotate_input_ids(next_token_ids),
            spec_info=EagleDraftInput(forward_batch.hidden_states),
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            input_logprobs=None,
            dp_rows=dp_rows,
        )
        return self.capture_for_decode(next_token_ids, *self._propose(draft_batch, sampler, output_positions))

    def _propose(
        self, forward_batch: ForwardBatch, sampler: DraftSampler | None, output_positions: torch.Tensor | None
    ) -> tuple[LogitsProcessorOutput, torch.Tensor | None]:
        """A forward's proposals: the likeliest tokens, or with a sampler one that is drawn, and its law.

        `output_positions` [bs] are those of the tokens proposed; only a sampler wants them.
        """
        if sampler is None:
            return self.model_runner.forward(forward_batch), None
        forward_batch.topk = None
        output = self.model_runner.forward(forward_batch)
        return output, sampler.draw(output, output_positions)

    def capture_for_decode(
        self,
        verified_id: torch.Tensor,
        logits_output: LogitsProcessorOutput,
        draft_probs: torch.Tensor | None = None,
    ) -> EagleDraftInput:
        """What the next step starts from."""
        proposals = (logits_output.topk_p, logits_output.topk_index)
        return EagleDraftInput(logits_output.hidden_states, verified_id, *proposals, draft_probs)

    # ---- draft ----

    def draft_forward(
        self, step: DecodeStep, draft_input: EagleDraftInput, sampler: DraftSampler | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Grow `steps` levels, the first out of the draft extend before: fields of EagleVerifyInput."""
        if self.speculative_num_steps == 0:
            return self._chain(step, step.output_tokens.new_empty(len(step.seq_lens), 0))
        tree = DraftTree(
            draft_input.topk_p,
            draft_input.topk_index,
            self._request_of_beam[: len(step.seq_lens) * self.topk],
            self._column_bits,
            self.kernels,
        )
        ahead = step.moved(self.kv_ahead)
        levels = self.kernels.assign_draft_cache_locs(
            self._table(), step.req_pool_indices, ahead.seq_lens, self.draft_slots_per_req(), self.topk
        )
        proposals = plan = None  # the attention backend's one plan serves all levels
        laws = [draft_input.draft_probs]
        for depth, level in enumerate(zip(*levels, strict=True), 1):
            if proposals is not None:
                tree.grow(proposals)
            before = draft_input if proposals is None else proposals
            forward_batch = self._draft_batch(ahead, tree, before.hidden_states, plan, *level)
            at = step.output_positions + depth if sampler else None
            proposals, law = self._propose(forward_batch, sampler, at)
            plan = forward_batch.attn_metadata
            laws.append(law)
        n = self.speculative_num_draft_tokens
        built = tree.build(proposals, draft_input.verified_id, step.seq_lens, n)
        return *built, torch.stack(laws, dim=1) if sampler else None

    def _chain(self, step: DecodeStep, drafts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same where nothing has to grow: every tree is its root and `drafts` [bs, n − 1] behind it."""
        nodes = torch.cat([step.output_tokens.unsqueeze(1), drafts], dim=1)
        depth, mask, *links = (t[: len(nodes)] for t in self._chain_links)
        return nodes, mask, (step.seq_lens.unsqueeze(1) + depth).flatten(), *links

    def _draft_batch(
        self,
        step: DecodeStep,
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
            attn_backend=self.model_runner.attn_backend,
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

    # ---- draft extend ----

    def draft_extend_forward(
        self, step: DecodeStep, output: EagleVerifyOutput, sampler: DraftSampler | None = None
    ) -> EagleDraftInput:
        """Rewrite the draft's KV at accepted positions from true hidden states; propose the next tokens.

        Every request gets `width` rows, whatever it accepted, so that nothing has to be read back;
        rows behind its path write to the padding slot and are seen by nobody.
        """
        width, paths = self.draft_extend_width(), output.paths
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.first_rows(len(step.seq_lens), width),
            max_q_len=width,
            attn_backend=self.model_runner.attn_backend,
            input_ids=paths.tokens.flatten(),
            positions=paths.positions,
            seq_lens=paths.kv_lens,
            out_cache_loc=paths.slots,
            seq_lens_cpu=step.planned(width),
            last_rows=paths.last_rows,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            spec_info=EagleDraftInput(output.hidden_states, hidden_rows=paths.rows),
            dp_rows=step.global_step.draft_extend_rows,
        )
        at = step.output_positions + paths.lens if sampler else None
        return self.capture_for_decode(paths.verified_id, *self._propose(forward_batch, sampler, at))

    # ---- beside other ranks of DP attention ----

    def forward_idle_draft(self, dp_rows: int) -> None:
        runner = self.model_runner
        hidden = torch.zeros(1, self.model_config.hidden_size, dtype=runner.dtype, device=self.device)
        runner.forward_idle(dp_rows, EagleDraftInput(hidden))


class EAGLEWorkerV2(BaseSpecWorker):
    draft_worker_class = EagleDraftWorker

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        draft_worker = self.draft_worker_class(server_args, target_worker)
        n, is_chain = draft_worker.speculative_num_draft_tokens, draft_worker.topk == 1
        super().__init__(server_args, target_worker, draft_worker, n, draft_worker.max_path, is_chain)
        self.speculative_num_steps = server_args.speculative_num_steps

    @property
    def draft_model_runner(self) -> ModelRunner:
        return self.draft_worker.model_runner

    def alloc_len_per_decode(self) -> int:
        """The draft's KV is scratch, in the same slots, and dead when verification begins."""
        drafts = max(self.draft_worker.draft_slots_per_req(), self.max_path + 1)
        return max(drafts + self.draft_worker.kv_ahead, self.speculative_num_draft_tokens)

    def alloc_len_per_extend(self) -> int:
        return self.draft_worker.kv_ahead

    def init_future_map(self, future_map: FutureMap) -> None:
        super().init_future_map(future_map)
        self.draft_worker.init_future_map(future_map)

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Record a round of each size: draft, verify, draft extend."""
        super().init_cuda_graphs(graphs)
        self.round_graphs = EagleCudaGraphs(self, graphs)
        topk = self.draft_worker.topk
        self.draft_model_runner.init_extend_graphs(graphs, CaptureHiddenMode.LAST, topk, is_draft=True)

    def forward_batch_generation(
        self, batch: ModelWorkerBatch, on_publish: OnPublish
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self.forward_extend(batch, on_publish)
        verify_input = self.draft(batch)
        output = self.verify(batch, verify_input)
        on_publish()
        self.forward_draft_extend_after_decode(batch, verify_input, output)
        return output.result

    def forward_extend(self, batch: ModelWorkerBatch, on_publish: OnPublish) -> GenerationBatchResult:
        """An ordinary prefill that also keeps the hidden state of every token, for the draft's own."""
        self._idle_while_others_draft(batch.global_step)
        forward_batch = ForwardBatch.init_new(batch, self.target_worker.model_runner)
        result = self.target_worker.forward_and_sample(batch, forward_batch)
        self.future_map.publish(forward_batch.req_pool_indices, forward_batch.seq_lens)
        on_publish()
        draws = ()
        if (sampler := self.sampler(batch.sampling_info)) is not None:
            (prompt_lens,) = upload(self.device, batch.prompt_lens)
            draws = (sampler, forward_batch.seq_lens - prompt_lens + 1)
        draft_input = self.draft_worker.forward_draft_extend(
            forward_batch, result.next_token_ids[:, 0], batch.global_step.draft_extend_rows, *draws
        )
        draft_input.stash(self.future_map, forward_batch.req_pool_indices)
        return result

    # ---- the phases of a round ----

    def draft(self, batch: ModelWorkerBatch) -> EagleVerifyInput:
        """Grow a tree of drafts behind every request's last token and choose the nodes to verify."""
        size = self.graph_size(batch)
        if size is not None:
            return self.round_graphs.draft(size, batch)
        inputs = (*upload(self.device, *batch.decode_inputs), batch.seq_lens_cpu, batch.global_step)
        step = DecodeStep.resolve(self.future_map, self.req_to_token_pool, *inputs)
        return self.grow(step, self.sampler(batch.sampling_info))

    def is_drawn(self, info: SamplingBatchInfo) -> bool:
        """Whether a batch's drafts are to be drawn; a greedy batch's are the likeliest."""
        return self.server_args.speculative_use_rejection_sampling and not info.is_all_greedy

    def sampler(self, info: SamplingBatchInfo) -> DraftSampler | None:
        """What draws the drafts of a batch, if they are to be drawn."""
        if not self.is_drawn(info):
            return None
        hot_token_id = getattr(self.draft_model_runner.model, "hot_token_id", None)
        return DraftSampler(info, self.kernels, hot_token_id)

    def grow(self, step: DecodeStep, sampler: DraftSampler | None = None) -> EagleVerifyInput:
        """The device's part of drafting."""
        draft_input = EagleDraftInput.resolve(self.future_map, step, is_drawn=sampler is not None)
        tree = self.draft_worker.draft_forward(step, draft_input, sampler)
        return EagleVerifyInput(step, self.verify_slots(step), *tree)

    def forward_draft_extend_after_decode(
        self, batch: ModelWorkerBatch, verify_input: EagleVerifyInput, output: EagleVerifyOutput
    ) -> None:
        """Bring the draft's KV up to date and leave to the next round what it drafts from."""
        size = self.graph_size(batch)
        if size is not None:
            self.round_graphs.draft_extend(size, self.round_graphs.kind(batch.sampling_info))
        else:
            self.extend_draft(verify_input.step, output, self.sampler(batch.sampling_info))

    def extend_draft(
        self, step: DecodeStep, output: EagleVerifyOutput, sampler: DraftSampler | None = None
    ) -> None:
        """The device's part of the draft extend."""
        draft_input = self.draft_worker.draft_extend_forward(step, output, sampler)
        draft_input.stash(self.future_map, step.req_pool_indices)

    # ---- beside other ranks of DP attention ----

    def rows_per_req(self) -> tuple[int, int, int]:
        width = self.draft_worker.draft_extend_width()
        return self.draft_worker.topk, self.speculative_num_draft_tokens, width

    def forward_idle(self, step: GlobalStep) -> GenerationBatchResult | None:
        size = self.graphs.padded_size(0, step)
        if size is not None:
            return self.round_graphs.idle(size)
        self._idle_while_others_draft(step)
        self.target_worker.model_runner.forward_idle(step.target_rows)
        self.draft_worker.forward_idle_draft(step.draft_extend_rows)
        return None

    def _idle_while_others_draft(self, step: GlobalStep) -> None:
        if step.draft_rows:
            for _ in range(self.speculative_num_steps - 1):
                self.draft_worker.forward_idle_draft(step.draft_rows)
