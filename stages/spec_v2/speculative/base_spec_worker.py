"""What every speculative method is to the scheduler, and what all share: how a tree is verified.

Restates sglang/srt/speculative/base_spec_worker.py and the verifying half of eagle_worker_common.py. A
method is composed of two workers, and is none itself: the target's, and one of its own that drafts (or None).
What a method hands from step to step it keeps in the future map, by rows of the request table.

Nothing here allocates, frees or reads back. A step begins with a batch of requests whose slots are reserved,
and ends when all is launched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.tree_types import AcceptedPaths
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.logprobs import LogprobRows, gather_logprobs
from ..managers.generation_result import GenerationBatchResult
from ..managers.overlap_utils import DecodeStep, FutureMap, OnPublish
from ..managers.schedule_batch import ModelWorkerBatch
from ..managers.tp_worker import TpModelWorker
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import PADDING_SLOT, ReqToTokenPool
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..server_args import ServerArgs
from .eagle_info import EagleVerifyInput, EagleVerifyOutput
from .spec_info import SpeculativeAlgorithm
from .verify_cuda_graphs import VerifyCudaGraphs


class BaseSpecWorker(ABC):
    """
    Args:
        server_args: the engine's flags.
        target_worker: verifies.
        draft_worker: drafts; None for a method without a draft model.
        num_draft_tokens: n, nodes of the tree that a round verifies, root included.
        max_path: the most drafted tokens that a round can accept.
        is_chain: every node hangs on the one before it, so that a path is a row's first nodes.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        target_worker: TpModelWorker,
        draft_worker: TpModelWorker | None,
        num_draft_tokens: int,
        max_path: int,
        is_chain: bool = False,
    ):
        self.server_args = server_args
        self.target_worker, self.draft_worker = target_worker, draft_worker
        self.speculative_num_draft_tokens, self.max_path, self.is_chain = num_draft_tokens, max_path, is_chain
        self.device, self.kernels = target_worker.device, target_worker.kernels
        self.round_graphs: VerifyCudaGraphs | None = None  # whoever calls `verify` makes them

    # ---- what the scheduler asks for ----

    @abstractmethod
    def forward_batch_generation(
        self, batch: ModelWorkerBatch, on_publish: OnPublish
    ) -> GenerationBatchResult:
        """Launch one step: of an extend one token for each request, of a decode step what a round accepts.

        A decode step begins with DecodeStep.resolve. `on_publish` is called once, as soon as the new lengths
        are in the future map, where `accept` puts those of a round. When this returns, the result's read has
        been started, and the map will hold all that the next step starts from.
        """

    def alloc_len_per_decode(self) -> int:
        """A: the most positions behind S that a round writes for one request."""
        return self.speculative_num_draft_tokens

    def alloc_len_per_extend(self) -> int:
        """The positions behind a prompt that its prefill writes."""
        return 0

    def kv_lookahead(self) -> int:
        """How many tokens behind its own the draft's KV of a position depends on."""
        return int(SpeculativeAlgorithm.from_string(self.server_args.speculative_algorithm).is_eagle())

    def rows_per_req(self) -> tuple[int, int, int]:
        """Rows of a decoding request in a forward of the draft loop, of the target, in the draft extend."""
        return 0, self.speculative_num_draft_tokens, 0

    def activate_step_by_batch(self, batch_size: int) -> BaseSpecWorker:
        """Who runs the decode step that is launched next, over `batch_size` requests."""
        return self

    def on_verify_complete_cpu(  # noqa: B027
        self, num_correct_drafts_per_req: list[int], num_steps: int, batch_size: int
    ) -> None:
        """The result of a round of `num_steps` over `batch_size` requests has come to the host.

        A method may choose its next rounds by how many drafts were correct, of each request that goes on.
        """

    def internal_state(self) -> dict[str, Any]:
        """What `get_server_info()` says of the method."""
        return {}

    def forward_idle(self, step: GlobalStep) -> GenerationBatchResult | None:
        """See TpModelWorker.forward_idle. A method that has not been made for ranks need not have it."""
        raise NotImplementedError(f"{type(self).__name__} cannot run beside other ranks")

    @property
    def model_runners(self) -> list[ModelRunner]:
        workers = (self.target_worker, self.draft_worker)
        return [worker.model_runner for worker in workers if worker is not None]

    def init_memory_pool(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        self.req_to_token_pool = req_to_token_pool
        for runner in self.model_runners:
            runner.init_memory_pool(req_to_token_pool, allocator)

    def init_future_map(self, future_map: FutureMap) -> None:
        """Take the map; a method adds the buffers that it drafts from."""
        self.future_map = future_map

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Register what is to be recorded; by default short prompts of the target."""
        self.graphs = graphs
        self.target_worker.graphs = graphs
        is_eagle = SpeculativeAlgorithm.from_string(self.server_args.speculative_algorithm).is_eagle()
        mode = CaptureHiddenMode.FULL if is_eagle else CaptureHiddenMode.NULL
        self.target_worker.model_runner.init_extend_graphs(graphs, mode)

    def graph_sizes(self) -> Sequence[int]:
        """The sizes in which a round of this worker is recorded."""
        return self.graphs.sizes

    def graph_size(self, batch: ModelWorkerBatch) -> int | None:
        """The size of the graphs that a round of `batch` is replayed in; None where it runs eagerly."""
        return self.graphs.padded_size(len(batch.reqs), batch.global_step)

    def clear_cache_pool(self) -> None:  # noqa: B027
        """Forget what was said before, where a method remembers more than a step."""

    # ---- verification ----

    def verify(self, batch: ModelWorkerBatch, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        """One target forward over all nodes, then each request's path, its KV put where it is looked for."""
        greedy = batch.sampling_info.is_plain_greedy and not batch.return_logprob
        size = self.graph_size(batch)
        if size is None:
            logits_output = self.target_forward(verify_input, topk=1 if greedy else None)
            output = self.accept(verify_input, logits_output, batch)
            output.result.start_read()
            return output
        if greedy and not batch.return_hidden_states:
            return self.round_graphs.verify(size)
        return self.round_graphs.verify_with_logits(size, verify_input, batch)

    def verify_slots(self, step: DecodeStep) -> torch.Tensor:
        """Where a round's nodes are written, [bs, n]: the slots are reserved, so none is allocated."""
        n = self.speculative_num_draft_tokens
        table = self.req_to_token_pool.req_to_token
        return self.kernels.assign_extend_cache_locs(table, step.req_pool_indices, step.seq_lens, n)

    def target_forward(self, verify_input: EagleVerifyInput, topk: int | None) -> LogitsProcessorOutput:
        """The target over all nodes: its logits, or with `topk` only the likeliest tokens of each."""
        step, n = verify_input.step, self.speculative_num_draft_tokens
        target = self.target_worker.model_runner
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=step.req_pool_indices,
            prefix_lens=step.seq_lens,
            q_start_loc=self.target_worker.first_rows(len(step.seq_lens), n),
            max_q_len=n,
            attn_backend=target.attn_backend,
            input_ids=verify_input.draft_token.flatten(),
            positions=verify_input.positions,
            seq_lens=step.seq_lens + n,
            out_cache_loc=verify_input.verify_slots.flatten(),
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
        batch: ModelWorkerBatch | None,
    ) -> EagleVerifyOutput:
        """Choose the paths, publish the lengths, settle the paths' KV, and collect what the host must know.

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
        self.future_map.publish(verify_input.step.req_pool_indices, paths.kv_lens)
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
            num_draft_tokens=self.speculative_num_draft_tokens,
        )
        paths = self._settle_accepted(verify_input, paths)
        return EagleVerifyOutput(paths, hidden_states, result)

    def _settle_accepted(self, verify_input: EagleVerifyInput, paths: AcceptedPaths) -> AcceptedPaths:
        """Make positions S … S + lens − 1 hold the accepted nodes' KV: what comes next knows chains only.

        A tree's path is moved to the front, whatever the page size: the table says where a position's KV is
        before anybody knows what is accepted, and no round changes that.
        """
        if self.is_chain:
            return paths
        front = verify_input.verify_slots[:, : self.max_path + 1]
        slots = torch.where(paths.nodes >= 0, front, PADDING_SLOT).flatten()
        self.target_worker.model_runner.token_to_kv_pool.move_kv_cache(slots, paths.slots)
        return paths._replace(slots=slots)

    def _score(
        self, batch: ModelWorkerBatch, logits: torch.Tensor, paths: AcceptedPaths
    ) -> LogprobRows | None:
        if not batch.return_logprob:
            return None
        top_num, token_ids = batch.output_logprobs
        (token_ids,) = upload(self.device, token_ids.repeat(self.max_path + 1, axis=0))
        return gather_logprobs(logits[paths.rows], paths.tokens.flatten(), top_num, token_ids, self.kernels)
