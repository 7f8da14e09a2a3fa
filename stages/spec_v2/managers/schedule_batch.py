"""Requests and batches on the host. Restates sglang/srt/managers/schedule_batch.py.

The host is one step behind the device. Of request i it knows `kv_len`, the tokens whose target KV exists as
far as results have been processed: len(prompt) + len(output) − 1, upstream's kv_committed_len. How many more
the step in flight accepts is known on the device alone, so slots are reserved for as many as it may be.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..layers.dp_attention import GlobalStep
from ..layers.logprobs import LogprobRows, gather_logprobs
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..mem_cache.radix_cache import RadixCache, TreeNode
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from ..sampling.sampling_batch_info import SamplingBatchInfo
from ..sampling.sampling_params import SamplingParams
from ..speculative.spec_info import SpeculativeAlgorithm

if TYPE_CHECKING:
    from .detokenizer import IncrementalDetokenizer
    from .forward_stream import ForwardStream
    from .generation_result import GenerationBatchResult

NOT_FINITE = (
    "the model's logits hold NaN or infinity for this request, so no token can be chosen: "
    "check the weights, or run in a wider dtype"
)


@dataclass
class FinishReason:
    """Why a request ended: `type` is "stop", "length" or "abort"; the rest is what result dicts show."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


@dataclass
class Logprobs:
    """What one request asked to be scored, and the scores so far, one entry per token.

    A score is (logprob, token id, None) as upstream's results have it; natural logarithms of the
    model's own distribution, before temperature, bias and penalties.
    """

    start_len: int
    top_num: int
    token_ids: list[int]
    input_token: list[tuple] = field(default_factory=list)
    input_top: list[list[tuple]] = field(default_factory=list)
    input_ids: list[list[tuple]] = field(default_factory=list)
    output_token: list[tuple] = field(default_factory=list)
    output_top: list[list[tuple]] = field(default_factory=list)
    output_ids: list[list[tuple]] = field(default_factory=list)

    def next_input(self) -> int:
        """Position of the first prompt row not yet scored; a retracted prompt may be half done."""
        return self.start_len + len(self.input_token)

    def with_first(self, prompt: list[int]) -> list[tuple]:
        """Input scores from start_len on; as upstream has it, the first of them carries none."""
        return [(None, prompt[self.start_len], None), *self.input_token]

    def add(self, kind: str, scores: LogprobRows, row: int, token: int) -> None:
        """Take one row of `scores` as the next "input" or "output" token's."""
        getattr(self, f"{kind}_token").append((float(scores.token[row]), token, None))
        top = zip(scores.top_values[row, : self.top_num], scores.top_ids[row], strict=False)
        getattr(self, f"{kind}_top").append([(float(v), int(i), None) for v, i in top])
        asked = zip(scores.id_values[row], self.token_ids, strict=False)
        getattr(self, f"{kind}_ids").append([(float(v), i, None) for v, i in asked])


def most_new_slots(alloc_len: int, page_size: int) -> int:
    """The most slots that one decode step adds to a request's: behind a prompt, to the end of a page."""
    return 2 * alloc_len + page_size - 1


@dataclass(eq=False)
class Req:
    """One request, from admission to result."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: SamplingParams
    seed: int | None  # drawn at admission where the caller gave none
    eos_token_ids: frozenset[int]
    context_length: int
    detokenizer: IncrementalDetokenizer | None = None
    logprobs: Logprobs | None = None
    return_hidden_states: bool = False
    routed_dp_rank: int | None = None  # None: the next rank in turn
    output_ids: list[int] = field(default_factory=list)
    hidden_states: list[np.ndarray] = field(default_factory=list)
    finished_reason: FinishReason | None = None

    # Memory: the row in req_to_token, KV entries that exist, positions that have a slot, and how many of the
    # entries the tree owns.
    req_pool_idx: int | None = None
    kv_len: int = 0
    kv_allocated_len: int = 0
    prefix_len: int = 0
    prefix_indices: np.ndarray | None = None
    last_node: TreeNode | None = None
    extend_end: int = 0
    stays: int = 0  # how often it has been given a row: a result of an earlier stay is too late

    # What the result reports.
    cached_tokens: int | None = None
    spec_verify_ct: int = 0
    spec_num_proposed_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = field(default_factory=list)
    created_time: float = field(default_factory=time.perf_counter)
    finished_time: float | None = None

    # What follows from the request, and is asked in every step.
    max_new_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    wants_only_ids: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.sampling_params
        room = self.context_length - len(self.origin_input_ids)
        self.max_new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        self.stop_ids = frozenset() if params.ignore_eos else params.stop_token_ids | self.eos_token_ids
        self.wants_only_ids = not (self.detokenizer or self.logprobs or self.return_hidden_states)

    def all_token_ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def finish(self, reason: FinishReason) -> None:
        self.finished_reason = reason
        self.finished_time = time.perf_counter()

    def init_next_round_input(self, tree_cache: RadixCache) -> None:
        """Look up the cached prefix and decide what is left to extend.

        A request that was retracted knows its next token already, so it extends up to, but not
        including, its last output: it then decodes on exactly as if it had never left.
        """
        ids = self.all_token_ids()
        self.extend_end = self.prompt_end()
        usable = self.extend_end - 1  # at least one row must run to give logits and a draft state
        if self.logprobs is not None and not self.output_ids:
            usable = min(usable, self.logprobs.next_input())
        match = tree_cache.match_prefix(ids, usable)
        self.kv_len = self.prefix_len = len(match.device_indices)
        self.last_node = match.last_node
        self.prefix_indices = match.device_indices

    def init_next_chunk(self) -> None:
        """The rest of a prompt whose first chunks have run."""
        self.extend_end = self.prompt_end()

    def prompt_end(self) -> int:
        """Tokens to extend over before decoding: the prompt, or all but the last of a resumed request."""
        return len(self.origin_input_ids) + max(len(self.output_ids) - 1, 0)

    def take(self, result: GenerationBatchResult, row: int) -> int:
        """Take this request's tokens of a step up to the one that ends it; returns how many were kept."""
        if not result.is_finite[row]:
            self.finish(FinishReason("abort", message=NOT_FINITE))
            return 0
        tokens = result.tokens[row]
        room = self.max_new_tokens - len(self.output_ids)
        if self.wants_only_ids and len(tokens) < room and self.stop_ids.isdisjoint(tokens):
            self.output_ids += tokens  # nearly always: nothing to do for each, and no rule that ends it here
            return len(tokens)
        first_row = row * result.next_token_ids.shape[1]
        for i, token in enumerate(tokens):
            self.append_output(token)
            if self.logprobs is not None:
                self.logprobs.add("output", result.logprobs, first_row + i, token)
            if self.return_hidden_states:
                self.hidden_states.append(result.hidden_states[first_row + i])
            if self.finished():
                break
        return i + 1

    def count_round(self, proposed: int, correct: int) -> None:
        """Book one verification: `correct` of `proposed` drafts ended up in the output."""
        self.spec_verify_ct += 1
        self.spec_num_proposed_drafts += proposed
        histogram = self.spec_correct_drafts_histogram
        if correct >= len(histogram):
            histogram += [0] * (correct + 1 - len(histogram))
        histogram[correct] += 1

    def append_output(self, token_id: int) -> None:
        """Take one generated token and check every stop rule on it."""
        self.output_ids.append(token_id)
        matched = self.detokenizer.append(token_id) if self.detokenizer is not None else None
        if token_id in self.stop_ids:
            self.finish(FinishReason("stop", matched=token_id))
        elif matched is not None:
            self.finish(FinishReason("stop", matched=matched))
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish(FinishReason("length", length=len(self.output_ids)))

    def reset_for_retract(self) -> None:
        self.kv_len = self.kv_allocated_len = self.prefix_len = 0
        self.last_node = None


@dataclass
class HostLogprobRequest:
    """Host side of forward_batch_info.LogprobRequest; `owners` [n] names each row's request."""

    rows: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    top_num: int
    token_ids: np.ndarray


@dataclass
class ModelWorkerBatch:
    """Host arrays of one step, int64. Nothing that is written later changes them: a job may come late."""

    forward_mode: ForwardMode
    reqs: list[Req]  # for methods that draft on the host
    req_pool_indices: np.ndarray  # [bs]
    prompt_lens: np.ndarray  # [bs]
    # Of a decode step; None for an extend. S is here where a backend needs it; else the future map knows.
    seq_lens_cpu: np.ndarray | None  # [bs]
    new_slots: tuple[np.ndarray, ...] | None  # see ScheduleBatch.table_entries
    # Of an extend; None for a decode step.
    input_ids: np.ndarray | None  # [rows]
    prefix_lens: np.ndarray | None  # [bs]
    seq_lens: np.ndarray | None  # [bs] KV entries after the step
    out_cache_loc: np.ndarray | None  # [rows]
    output_positions: np.ndarray | None  # [bs] index of the output token that this step samples
    # [bs, any] the tokens behind the last row where they are known, else −1
    known_next_tokens: np.ndarray | None
    sampling_info: SamplingBatchInfo
    capture_hidden_mode: CaptureHiddenMode
    return_hidden_states: bool
    input_logprobs: HostLogprobRequest | None
    output_logprobs: tuple[int, np.ndarray] | None  # see ScheduleBatch.logprob_shape
    spec_algorithm: SpeculativeAlgorithm
    global_step: GlobalStep  # what the ranks of DP attention agreed on

    @property
    def decode_inputs(self) -> tuple[np.ndarray, ...]:
        """What DecodeStep.resolve takes on the device."""
        return self.req_pool_indices, self.prompt_lens, *self.new_slots

    @property
    def return_logprob(self) -> bool:
        return self.output_logprobs is not None

    @property
    def needs_logits(self) -> bool:
        """False if each row's likeliest token is all that anybody asks for."""
        return self.output_logprobs is not None or not self.sampling_info.is_plain_greedy

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, kernels: Any) -> LogprobRows | None:
        """Logprobs of the sampled `tokens` [bs] under `logits` [bs, vocab], if any request wants them."""
        if self.output_logprobs is None:
            return None
        top_num, token_ids = self.output_logprobs
        return gather_logprobs(logits, tokens, top_num, upload(logits.device, token_ids)[0], kernels)


@dataclass
class ScheduleBatch:
    """The requests of one step, in row order, with the state that travels with each row."""

    reqs: list[Req]
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: TokenToKVPoolAllocator
    tree_cache: RadixCache
    device: torch.device
    vocab_size: int
    spec_algorithm: SpeculativeAlgorithm
    forward_stream: ForwardStream
    forward_mode: ForwardMode = ForwardMode.IDLE
    req_pool_indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sampling_info: SamplingBatchInfo | None = None  # it belongs to the forward stream's jobs
    # Filled by prepare_for_decode for the step at hand.
    new_slots: tuple[np.ndarray, ...] | None = None
    # Filled by prepare_for_extend for the step at hand.
    prefix_lens: np.ndarray | None = None
    seq_lens: np.ndarray | None = None
    out_cache_loc: np.ndarray | None = None
    input_logprobs: HostLogprobRequest | None = None
    global_step: GlobalStep = GlobalStep()
    stays: list[int] = field(default_factory=list)

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    # ---- memory ----

    def evict_from_tree_cache(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` slots; False if locked or running KV leaves too little."""
        allocator = self.token_to_kv_pool_allocator
        if (short := num_tokens - allocator.available_size()) > 0:
            self.tree_cache.evict(short)
        return num_tokens <= allocator.available_size()

    def reserved_lens(self, alloc_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions that have a slot now, and that have one once the next step is prepared, [bs] each.

        A step writes up to `alloc_len` positions behind S. S is `kv_len` and what the step in flight accepts,
        which is no more than `alloc_len` either. Nothing is given back in between: see RadixCache.
        """
        page = self.token_to_kv_pool_allocator.page_size
        now = np.array([r.kv_allocated_len for r in self.reqs], dtype=np.int64)
        need = np.array([r.kv_len for r in self.reqs], dtype=np.int64) + 2 * alloc_len
        return now, np.maximum(now, -(-need // page) * page)

    def check_decode_mem(self, alloc_len: int = 1) -> bool:
        """Whether the reservation for a step fits, after evicting."""
        allocator = self.token_to_kv_pool_allocator
        most = len(self.reqs) * most_new_slots(alloc_len, allocator.page_size)
        if most <= allocator.available_size():  # nearly always
            return True
        return self.evict_from_tree_cache(allocator.new_slots(*self.reserved_lens(alloc_len)))

    def alloc_slots(self, now: np.ndarray, then: np.ndarray) -> np.ndarray:
        """Slots for positions now … then − 1 of each request, [sum], entered in the host's table."""
        pool, allocator = self.req_to_token_pool, self.token_to_kv_pool_allocator
        counts, table = then - now, pool.req_to_token_host
        last_locs = table[self.req_pool_indices, np.maximum(now - 1, 0)]
        slots = allocator.alloc_extend(now, then, last_locs)
        if slots is None:  # the scheduler checked; so this is a bug, not a full pool
            raise RuntimeError(f"{counts.sum()} slots wanted, {allocator.available_size()} free")
        start = 0
        for req, count, end in zip(self.reqs, counts.tolist(), then.tolist(), strict=True):
            table[req.req_pool_idx, end - count : end] = slots[start : start + count]
            req.kv_allocated_len = end
            start += count
        return slots

    def table_entries(self, start: np.ndarray, end: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        """What the host's table has at positions start … end − 1 of each request, for ReqToTokenPool.assign:
        start [bs], slots [bs, width], of which the first lens [bs] count.
        """
        table = self.req_to_token_pool.req_to_token_host
        columns = np.minimum(start[:, None] + np.arange(width), table.shape[1] - 1)
        return start, table[self.req_pool_indices[:, None], columns], end - start

    def write_table(self, start: np.ndarray, end: np.ndarray) -> None:
        """Bring positions start … end − 1 of each request, [bs] each, from the host's table to the device."""
        entries = self.table_entries(start, end, int((end - start).max()))
        self.req_to_token_pool.assign(*upload(self.device, self.req_pool_indices, *entries))

    # ---- one step ----

    def prepare_for_extend(self, alloc_len: int = 0) -> None:
        """Give each request a row and slots for positions kv_len … extend_end − 1 + alloc_len."""
        self.forward_mode = ForwardMode.EXTEND
        pool = self.req_to_token_pool
        new = [r for r in self.reqs if r.req_pool_idx is None]
        for req, row in zip(new, pool.alloc(len(new)), strict=True):
            req.req_pool_idx = row
            req.stays += 1
            pool.req_to_token_host[row, : req.kv_len] = req.prefix_indices
            if req.cached_tokens is None:
                req.cached_tokens = req.kv_len
        self.req_pool_indices = np.array([r.req_pool_idx for r in self.reqs], dtype=np.int64)
        self.prefix_lens = np.array([r.kv_len for r in self.reqs], dtype=np.int64)
        self.seq_lens = np.array([r.extend_end for r in self.reqs], dtype=np.int64)
        # A chunk's first slots may stand behind the chunk before.
        now = np.maximum(self.prefix_lens, [r.kv_allocated_len for r in self.reqs])
        then = np.maximum(now, self.seq_lens + alloc_len)
        self.evict_from_tree_cache(self.token_to_kv_pool_allocator.new_slots(now, then))
        self.alloc_slots(now, then)
        rows = zip(self.req_pool_indices, self.prefix_lens, self.seq_lens, strict=True)
        table = pool.req_to_token_host
        self.out_cache_loc = np.concatenate([table[row, start:end] for row, start, end in rows])
        # A row may have been another request's, and a step in flight may still run for that one: it must not
        # follow the new slots, above all not write to them.
        self.forward_stream.wait_for_reads()
        self.write_table(np.zeros_like(then), then)
        for req in self.reqs:
            req.kv_len = req.extend_end
        self.sampling_info = self.forward_stream.submit(
            SamplingBatchInfo.from_reqs, self.reqs, self.vocab_size, self.device
        ).result()

    def prepare_for_decode(self, alloc_len: int) -> None:
        """Reserve slots for the step in flight and the next.

        The next step's job enters them into the device's table, and jobs run one after the other: nothing has
        to wait for the step in flight.
        """
        self.forward_mode = ForwardMode.DECODE
        now, then = self.reserved_lens(alloc_len)
        self.alloc_slots(now, then)
        width = most_new_slots(alloc_len, self.token_to_kv_pool_allocator.page_size)
        self.new_slots = self.table_entries(now, then, width)

    def get_model_worker_batch(self, seq_lens_cpu: np.ndarray | None = None) -> ModelWorkerBatch:
        extend = self.forward_mode.is_extend()
        input_ids = known = output_positions = None
        if extend:
            ids = [r.all_token_ids() for r in self.reqs]
            input_ids = np.concatenate(
                [np.array(i[p:e]) for i, p, e in zip(ids, self.prefix_lens, self.seq_lens, strict=True)]
            )
            known = np.full((len(ids), max(1, self.tree_cache.lookahead)), -1, dtype=np.int64)
            for row, i, end in zip(known, ids, self.seq_lens, strict=True):
                behind = i[end : end + len(row)]  # of the prompt, and of the output of a request that resumes
                row[: len(behind)] = behind
            output_positions = np.array([len(r.output_ids) for r in self.reqs], dtype=np.int64)
        self.input_logprobs = self._input_logprob_rows() if extend else None
        needs_hidden = self.return_hidden_states
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            reqs=self.reqs,
            req_pool_indices=self.req_pool_indices,
            prompt_lens=self.prompt_lens,
            seq_lens_cpu=seq_lens_cpu,
            new_slots=self.new_slots,
            input_ids=input_ids,
            prefix_lens=self.prefix_lens,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            output_positions=output_positions,
            known_next_tokens=known,
            sampling_info=self.sampling_info,
            capture_hidden_mode=CaptureHiddenMode.LAST if needs_hidden else CaptureHiddenMode.NULL,
            return_hidden_states=needs_hidden,
            input_logprobs=self.input_logprobs,
            output_logprobs=self.logprob_shape() if self.return_logprob else None,
            spec_algorithm=self.spec_algorithm,
            global_step=self.global_step,
        )

    # ---- when the result is there ----

    def launched(self) -> ScheduleBatch:
        """The batch as it is now, for its result: rows may come and go until that is there."""
        batch = copy.copy(self)
        batch.stays = [r.stays for r in self.reqs]
        return batch

    def rows_in_time(self) -> Iterator[tuple[int, Req]]:
        """Rows whose result counts: a request that has ended, or was pushed back, has no use for it."""
        for i, (req, stays) in enumerate(zip(self.reqs, self.stays, strict=True)):
            if not req.finished() and req.req_pool_idx is not None and req.stays == stays:
                yield i, req

    def _input_logprob_rows(self) -> HostLogprobRequest | None:
        """Rows of this extend that predict a prompt token somebody wants scored."""
        rows, targets, owners, first_row = [], [], [], 0
        for i, (req, prefix, end) in enumerate(zip(self.reqs, self.prefix_lens, self.seq_lens, strict=True)):
            if req.logprobs is not None and not req.output_ids:
                prompt = req.origin_input_ids
                positions = range(max(int(prefix), req.logprobs.next_input()), min(int(end), len(prompt) - 1))
                rows += [first_row + p - int(prefix) for p in positions]
                targets += [prompt[p + 1] for p in positions]
                owners += [i] * len(positions)
            first_row += int(end - prefix)
        if not rows:
            return None
        top_num, token_ids = self.logprob_shape()
        owners = np.array(owners)
        return HostLogprobRequest(np.array(rows), np.array(targets), owners, top_num, token_ids[owners])

    def logprob_shape(self) -> tuple[int, np.ndarray]:
        """What serves every request of the batch: the largest top-n, and token ids [bs, m], 0-padded."""
        wanted = [r.logprobs for r in self.reqs]
        top_num = max((w.top_num for w in wanted if w), default=0)
        width = max((len(w.token_ids) for w in wanted if w), default=0)
        token_ids = np.zeros((len(wanted), width), dtype=np.int64)
        for row, w in zip(token_ids, wanted, strict=True):
            if w:
                row[: len(w.token_ids)] = w.token_ids
        return top_num, token_ids

    # ---- rows come and go ----

    def __post_init__(self) -> None:
        self._rows_changed()

    def _rows_changed(self) -> None:
        self.prompt_lens = np.array([len(r.origin_input_ids) for r in self.reqs], dtype=np.int64)
        self.return_logprob = any(r.logprobs is not None for r in self.reqs)
        self.return_hidden_states = any(r.return_hidden_states for r in self.reqs)

    def filter_batch(self, keep: list[int] | None = None) -> None:
        """Keep rows `keep` (by default those not finished), in that order, in everything that has rows."""
        if keep is None:
            keep = [i for i, r in enumerate(self.reqs) if r.finished_reason is None]
        if len(keep) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep]
        self._rows_changed()
        self.req_pool_indices = self.req_pool_indices[keep]
        if self.reqs:
            self.forward_stream.submit(self.sampling_info.filter_batch, keep)
        else:
            self.sampling_info = None

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append the rows of `other`."""
        if other.is_empty():
            return
        if self.is_empty():
            self.sampling_info = other.sampling_info
        else:
            self.forward_stream.submit(self.sampling_info.merge_batch, other.sampling_info)
        self.reqs = self.reqs + other.reqs
        self._rows_changed()
        self.req_pool_indices = np.concatenate([self.req_pool_indices, other.req_pool_indices])

    def retract_decode(self, alloc_len: int) -> list[Req]:
        """Push requests back to the queue until a step fits; at least one stays. Returns those pushed back.

        Whoever has produced least, and of those the youngest, goes first: the least work is redone.
        """
        retracted = []
        while len(self.reqs) > 1 and not self.check_decode_mem(alloc_len):
            victim = min(range(len(self.reqs)), key=lambda i: (len(self.reqs[i].output_ids), -i))
            req = self.reqs[victim]
            self.tree_cache.cache_finished_req(req)
            req.reset_for_retract()
            retracted.append(req)
            self.filter_batch([i for i in range(len(self.reqs)) if i != victim])
        return retracted
