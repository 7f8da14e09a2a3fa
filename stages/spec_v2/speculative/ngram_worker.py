"""Drafts without a draft model: what came behind the last tokens when they were said before.

Restates sglang/srt/speculative/ngram_worker.py. A round is a look-up on the host and the verification that
all methods share. The look-up starts from a request's last tokens, so the job of a step first waits for what
the step before has accepted, as upstream's does: for the same copy that the scheduler reads then. The device
idles while the host matches and sends the trees; scheduling, streaming and the end of requests overlap with
it all the same. So does remembering, which takes longer than looking up: a prompt is taken in while its
prefill runs, and what a round has accepted while the next one is verified. The trees of that next one go on
from it, and do not find it yet.

A request that has ended takes part in one more round, and what that accepts is remembered like all else: it
was said, if to nobody.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.generation_result import GenerationBatchResult
from ..managers.overlap_utils import DecodeStep, OnPublish
from ..managers.schedule_batch import ModelWorkerBatch
from ..managers.tp_worker import TpModelWorker
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import ForwardBatch
from ..model_executor.packed_buffer import PackedBuffer
from ..server_args import ServerArgs
from .base_spec_worker import BaseSpecWorker
from .cpp_ngram.ngram_corpus import make_corpus
from .eagle_info import EagleVerifyInput, EagleVerifyOutput
from .verify_cuda_graphs import VerifyCudaGraphs

TREE_FIELDS = 5  # arrays that describe the trees of a step; see NgramCorpus.match


class NGRAMWorker(BaseSpecWorker):
    """
    Raises:
        RuntimeError: the matching cannot be compiled; see make_corpus.
    """

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        n = server_args.speculative_num_draft_tokens
        # A match of one token leaves the trie's other levels for drafts.
        max_path = min(n, server_args.speculative_ngram_max_trie_depth) - 1
        super().__init__(server_args, target_worker, None, n, max_path)
        rows = torch.arange(server_args.max_running_requests * n, device=self.device)
        self._retrieve_index = rows.view(-1, n)
        self.clear_cache_pool()

    def clear_cache_pool(self) -> None:
        self.corpus = make_corpus(self.server_args)
        self._new_id = itertools.count()
        self._ids: dict[int, int] = {}  # row of the request table → the corpus's request
        # Steps whose tokens the corpus lacks: the request of each row, None where a prompt is not all there.
        self._unread: list[tuple[list[int | None], GenerationBatchResult]] = []

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Record a round of each size: the trees as the host sends them, and their verification."""
        super().init_cuda_graphs(graphs)
        self.round_graphs = NgramCudaGraphs(self, graphs)

    def forward_batch_generation(
        self, batch: ModelWorkerBatch, on_publish: OnPublish
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self.forward_extend(batch, on_publish)
        heard = self.hear()
        verify_input = self.draft(batch, heard)
        output = self.verify(batch, verify_input)
        on_publish()
        self.corpus.append(list(heard), list(heard.values()))
        self._unread.append((self._ids_of(batch), output.result))
        return output.result

    def accept(
        self,
        verify_input: EagleVerifyInput,
        logits_output: LogitsProcessorOutput,
        batch: ModelWorkerBatch | None,
    ) -> EagleVerifyOutput:
        """The last token is all that the next round needs of this one."""
        output = super().accept(verify_input, logits_output, batch)
        self.future_map.stash(verify_input.step.req_pool_indices, output.paths.verified_id)
        return output

    def forward_extend(self, batch: ModelWorkerBatch, on_publish: OnPublish) -> GenerationBatchResult:
        """An ordinary prefill. It waits for nothing, and while it runs the corpus takes in its prompts."""
        forward_batch = ForwardBatch.init_new(batch, self.target_worker.model_runner)
        result = self.target_worker.forward_and_sample(batch, forward_batch)
        self.future_map.publish(forward_batch.req_pool_indices, forward_batch.seq_lens)
        on_publish()
        self.future_map.stash(forward_batch.req_pool_indices, result.next_token_ids[:, 0])
        ids: list[int | None] = []
        for row, end, req in zip(batch.req_pool_indices.tolist(), batch.seq_lens, batch.reqs, strict=True):
            is_whole = end == req.prompt_end()
            ids.append(self._begin(row, req.all_token_ids()[:end]) if is_whole else None)
        self._unread.append((ids, result))
        return result

    # ---- what was said ----

    def _begin(self, row: int, tokens: list[int]) -> int:
        """A request has come to a row of the request table; whose that was is gone."""
        if row in self._ids:
            self.corpus.forget(self._ids[row])
        self._ids[row] = new = next(self._new_id)
        self.corpus.append([new], [tokens])
        return new

    def _ids_of(self, batch: ModelWorkerBatch) -> list[int]:
        return [self._ids[row] for row in batch.req_pool_indices.tolist()]

    def hear(self) -> dict[int, list[int]]:
        """Wait for the last step's tokens; all that requests have said and the corpus has not been told."""
        present, heard = set(self._ids.values()), {}
        for ids, result in self._unread:
            # A graph's result has padding rows behind those of the requests.
            for i, run in zip(ids, result.read().tokens, strict=False):
                if i in present:
                    heard[i] = run  # once: what a request says next is read after this was told
        self._unread.clear()
        return heard

    # ---- what may come next ----

    def draft(self, batch: ModelWorkerBatch, heard: dict[int, list[int]]) -> EagleVerifyInput:
        """Look up a tree for every request; where nothing matches it is the last token alone."""
        ids = self._ids_of(batch)
        trees = self.corpus.match(ids, self.speculative_num_draft_tokens, [heard.get(i, []) for i in ids])
        size = self.graphs.padded_size(len(batch.reqs), batch.global_step)
        if size is not None:
            return self.round_graphs.draft(size, batch, trees)
        return self.plant(upload(self.device, *batch.decode_inputs, *trees), batch.seq_lens_cpu)

    def plant(self, arrays: list[torch.Tensor], seq_lens_cpu: np.ndarray | None = None) -> EagleVerifyInput:
        """The device's part of drafting: the inputs of a step, and behind them its trees."""
        inputs, trees = arrays[:-TREE_FIELDS], arrays[-TREE_FIELDS:]
        step = DecodeStep.resolve(self.future_map, self.req_to_token_pool, *inputs, seq_lens_cpu)
        return self._verify_input(step, *trees)

    def _verify_input(
        self,
        step: DecodeStep,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        depths: torch.Tensor,
        first_child: torch.Tensor,
        next_sibling: torch.Tensor,
    ) -> EagleVerifyInput:
        """NgramCorpus.match says what the fields are, [bs, n] each."""
        return EagleVerifyInput(
            step,
            self.verify_slots(step),
            draft_token=tokens,
            tree_mask=mask.unsqueeze(-1),
            positions=(step.seq_lens.unsqueeze(1) + depths).flatten(),
            retrieve_index=self._retrieve_index[: len(tokens)],
            retrieve_next_token=first_child,
            retrieve_next_sibling=next_sibling,
        )


class NgramCudaGraphs(VerifyCudaGraphs):
    def _input_buffer(self, size: int) -> PackedBuffer:
        n = self.worker.speculative_num_draft_tokens
        buffer = PackedBuffer(self.worker.device, self._input_shapes(size) + [(size, n)] * TREE_FIELDS)
        buffer.send(*buffer.no_rows()[:-TREE_FIELDS], *self._empty_trees(size))
        return buffer

    def _empty_trees(self, count: int) -> np.ndarray:
        """Trees in which nothing was found, for padding rows: [5, count, n]."""
        n = self.worker.speculative_num_draft_tokens
        fields = np.zeros((TREE_FIELDS, count, n), dtype=np.int64)
        fields[1], fields[3:] = np.left_shift(np.int64(1), np.arange(n)), -1
        return fields

    def _draft(self, buffer: PackedBuffer) -> EagleVerifyInput:
        return self.worker.plant(buffer.device)

    def draft(self, size: int, batch: ModelWorkerBatch, trees: np.ndarray) -> EagleVerifyInput:
        bs = len(batch.reqs)
        if bs < size:
            trees = np.concatenate((trees, self._empty_trees(size - bs)), axis=1)
        self.inputs[size].send(*batch.decode_inputs, *trees)
        self.seq_lens_cpu = batch.seq_lens_cpu
        return self._rows(self.graphs.replay(self._key("draft", size)), bs)
