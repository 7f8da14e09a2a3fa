"""Requests and batches on the host. Restates sglang/srt/managers/schedule_batch.py.

Between steps, `seq_lens[i]` counts the tokens of request i whose target KV exists:
len(prompt) + len(output) − 1. The last output token has none yet; the next step computes it.
"""

from __future__ import annotations

import time
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

    # Memory: the row in req_to_token, KV entries that exist, and how many of them the tree owns.
    req_pool_idx: int | None = None
    kv_len: int = 0
    prefix_len: int = 0
    prefix_indices: np.ndarray | None = None
    last_node: TreeNode | None = None
    extend_end: int = 0

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

    def known_next_token(self, extend_end: int) -> int:
        """The token at position `extend_end` if it need not be sampled, else −1."""
        index = extend_end - len(self.origin_input_ids)  # in the output, where a resumed request's chunks end
        if index < 0:
            return self.origin_input_ids[extend_end]
        return self.output_ids[index] if index < len(self.output_ids) else -1

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
        self.kv_len = self.prefix_len = 0
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
    """Host arrays of one step, int64."""

    forward_mode: ForwardMode
    input_ids: np.ndarray  # [rows]
    req_pool_indices: np.ndarray  # [bs]
    prefix_lens: np.ndarray  # [bs]
    seq_lens: np.ndarray  # [bs] KV entries after the step
    out_cache_loc: np.ndarray  # [rows]
    output_positions: np.ndarray  # [bs] index of the output token that this step samples; < 0: none yet
    # Of an extend; None for a decode step.
    known_next_tokens: np.ndarray | None  # [bs] the token behind the last row where it is known, else −1
    table_slots: np.ndarray | None  # [bs, width] rows of req_to_token, since the prefix came from the tree
    sampling_info: SamplingBatchInfo
    capture_hidden_mode: CaptureHiddenMode
    return_hidden_states: bool
    input_logprobs: HostLogprobRequest | None
    output_logprobs: tuple[int, np.ndarray] | None  # see ScheduleBatch.logprob_shape
    spec_algorithm: SpeculativeAlgorithm
    spec_info: Any  # what the requests bring along from their last round, an EagleDraftInput, or None
    global_step: GlobalStep  # what the ranks of DP attention agreed on

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
    forward_mode: ForwardMode = ForwardMode.IDLE
    req_pool_indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    seq_lens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sampling_info: SamplingBatchInfo | None = None
    spec_info: Any = None
    output_ids: np.ndarray | None = None  # [bs] last tokens, as read; None where rows have changed since
    # Filled by prepare_for_extend and prepare_for_decode for the step at hand.
    prefix_lens: np.ndarray | None = None
    out_cache_loc: np.ndarray | None = None
    input_logprobs: HostLogprobRequest | None = None
    global_step: GlobalStep = GlobalStep()

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

    def check_decode_mem(self, buf_multiplier: int = 1) -> bool:
        """Whether a step that takes up to `buf_multiplier` slots per request fits, after evicting."""
        allocator = self.token_to_kv_pool_allocator
        page = allocator.page_size
        if len(self.reqs) * -(-buf_multiplier // page) * page <= allocator.available_size():
            return True  # nearly always: room even if no request's last page had any left
        need = allocator.new_slots(self.seq_lens, self.seq_lens + buf_multiplier)
        return self.evict_from_tree_cache(need)

    def alloc_extend_slots(self, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Slots for positions prefix_lens … seq_lens − 1 of each request, [sum]."""
        table = self.req_to_token_pool.req_to_token_host
        last_locs = table[self.req_pool_indices, np.maximum(prefix_lens - 1, 0)]
        slots = self.token_to_kv_pool_allocator.alloc_extend(prefix_lens, seq_lens, last_locs)
        return self._checked(slots, int((seq_lens - prefix_lens).sum()))

    def alloc_decode_slots(self, width: int) -> np.ndarray:
        """Slots for the next `width` positions of each request, [bs, width]."""
        bs = len(self.reqs)
        if self.token_to_kv_pool_allocator.page_size == 1:  # no page to go on with, so any slots will do
            slots = self._checked(self.token_to_kv_pool_allocator.alloc(bs * width), bs * width)
        else:
            slots = self.alloc_extend_slots(self.seq_lens, self.seq_lens + width)
        return slots.reshape(bs, width)

    def _checked(self, slots: np.ndarray | None, wanted: int) -> np.ndarray:
        if slots is None:  # the scheduler checked; so this is a bug, not a full pool
            free = self.token_to_kv_pool_allocator.available_size()
            raise RuntimeError(f"{wanted} slots wanted, {free} free")
        return slots

    # ---- one step ----

    def prepare_for_extend(self) -> None:
        """Give each request a row and slots for positions kv_len … extend_end − 1."""
        self.forward_mode = ForwardMode.EXTEND
        pool = self.req_to_token_pool
        new = [r for r in self.reqs if r.req_pool_idx is None]
        for req, row in zip(new, pool.alloc(len(new)), strict=True):
            req.req_pool_idx = row
            pool.req_to_token_host[row, : req.kv_len] = req.prefix_indices
            if req.cached_tokens is None:
                req.cached_tokens = req.kv_len
        self.req_pool_indices = np.array([r.req_pool_idx for r in self.reqs], dtype=np.int64)
        self.prefix_lens = np.array([r.kv_len for r in self.reqs], dtype=np.int64)
        self.seq_lens = np.array([r.extend_end for r in self.reqs], dtype=np.int64)
        self.evict_from_tree_cache(self.token_to_kv_pool_allocator.new_slots(self.prefix_lens, self.seq_lens))
        self.out_cache_loc = self.alloc_extend_slots(self.prefix_lens, self.seq_lens)
        start = 0
        for req in self.reqs:
            count = req.extend_end - req.kv_len
            pool.req_to_token_host[req.req_pool_idx, req.kv_len : req.extend_end] = self.out_cache_loc[
                start : start + count
            ]
            start += count
            req.kv_len = req.extend_end
        self.sampling_info = SamplingBatchInfo.from_reqs(self.reqs, self.vocab_size, self.device)

    def prepare_for_decode(self) -> None:
        """One more slot per request. A speculative batch allocates inside its worker instead."""
        self.forward_mode = ForwardMode.DECODE
        if not self.spec_algorithm.is_none():
            return
        self.out_cache_loc = self.alloc_decode_slots(1)[:, 0]
        self.prefix_lens = self.seq_lens
        self.seq_lens = self.seq_lens + 1

    def book_decode_slots(self) -> None:
        """The host's notes of a plain decode step, which can wait until the step is launched."""
        self.req_to_token_pool.req_to_token_host[self.req_pool_indices, self.prefix_lens] = self.out_cache_loc
        for req in self.reqs:
            req.kv_len += 1

    def take(self, result: GenerationBatchResult) -> None:
        """Give each request its token of a plain decode step."""
        self.output_ids = result.next_token_ids[: len(self.reqs), 0]
        tokens = self.output_ids.tolist()
        if self._none_ends(result, tokens):
            for req, token in zip(self.reqs, tokens, strict=True):
                req.output_ids.append(token)
        else:
            for i, req in enumerate(self.reqs):
                req.take(result, i)

    def take_accepted(self, result: GenerationBatchResult, proposed: int) -> np.ndarray:
        """Give each request what it accepted of `proposed` drafts and the token behind, and book the round.

        Returns how many tokens each kept, [bs]: all, or those up to the one that ends it.
        """
        is_accepted = result.accept_index[: len(self.reqs)] >= 0
        kept, start = is_accepted.sum(1), 0
        tokens = result.next_token_ids[: len(self.reqs)][is_accepted].tolist()  # row after row
        none_ends = self._none_ends(result, tokens)
        for i, (req, count) in enumerate(zip(self.reqs, kept.tolist(), strict=True)):
            correct = count - 1
            if none_ends:
                req.output_ids += tokens[start : start + count]
                start += count
            else:
                kept[i] = count = req.take(result, i)
                correct = min(count, correct)
            req.kv_len += count
            req.count_round(proposed, correct)
        return kept

    def _none_ends(self, result: GenerationBatchResult, tokens: list[int]) -> bool:
        """Whether no request ends at one of `tokens` or wants more than ids, as nearly always.

        These are the rules of Req.take, asked once for all rows: asking each takes several times as long. For
        that `least_room` is counted down by the most that a step adds, so it is asked once in every step.
        """
        most = result.next_token_ids.shape[1]
        if self.least_room <= most:
            self.least_room = min(r.max_new_tokens - len(r.output_ids) for r in self.reqs)
        has_room = self.least_room > most
        self.least_room -= most
        return has_room and self.wants_only_ids and self.stop_ids.isdisjoint(tokens) and all(result.is_finite)

    def get_model_worker_batch(self) -> ModelWorkerBatch:
        extend = self.forward_mode.is_extend()
        if extend:
            ids = [r.all_token_ids() for r in self.reqs]
            input_ids = np.concatenate(
                [np.array(i[p:e]) for i, p, e in zip(ids, self.prefix_lens, self.seq_lens, strict=True)]
            )
            known = np.array([r.known_next_token(r.extend_end) for r in self.reqs], dtype=np.int64)
            # Later chunks rewrite the rows with the same slots.
            table_slots = self.req_to_token_pool.req_to_token_host[
                self.req_pool_indices, : int(self.seq_lens.max())
            ]
        else:
            input_ids = self.output_ids
            if input_ids is None:
                input_ids = np.array([r.output_ids[-1] for r in self.reqs])
            known = table_slots = None
        self.input_logprobs = self._input_logprob_rows() if extend else None
        needs_hidden = self.return_hidden_states
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            input_ids=input_ids,
            req_pool_indices=self.req_pool_indices,
            prefix_lens=self.prefix_lens,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            output_positions=self.seq_lens - self.prompt_lens,
            known_next_tokens=known,
            table_slots=table_slots,
            sampling_info=self.sampling_info,
            capture_hidden_mode=CaptureHiddenMode.LAST if needs_hidden else CaptureHiddenMode.NULL,
            return_hidden_states=needs_hidden,
            input_logprobs=self.input_logprobs,
            output_logprobs=self.logprob_shape() if self.return_logprob else None,
            spec_algorithm=self.spec_algorithm,
            spec_info=self.spec_info,
            global_step=self.global_step,
        )

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
        self.output_ids = None
        self.least_room = 0  # tokens that each request has left at least; counted anew where it is too few
        self.stop_ids = frozenset().union(*(r.stop_ids for r in self.reqs))
        self.wants_only_ids = all(r.wants_only_ids for r in self.reqs)
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
        self.seq_lens = self.seq_lens[keep]
        if not self.reqs:
            self.sampling_info = self.spec_info = None
            return
        self.sampling_info.filter_batch(keep)
        if self.spec_info is not None:
            (index,) = upload(self.device, np.array(keep))
            self.spec_info.filter_batch(index)

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append the rows of `other`."""
        if other.is_empty():
            return
        if self.is_empty():
            self.sampling_info, self.spec_info = other.sampling_info, other.spec_info
        else:
            self.sampling_info.merge_batch(other.sampling_info)
            if self.spec_info is not None:
                self.spec_info.merge_batch(other.spec_info)
        self.reqs = self.reqs + other.reqs
        self._rows_changed()
        self.req_pool_indices = np.concatenate([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = np.concatenate([self.seq_lens, other.seq_lens])

    def retract_decode(self, buf_multiplier: int) -> list[Req]:
        """Push requests back to the queue until a step fits; at least one stays. Returns those pushed back.

        Whoever has produced least, and of those the youngest, goes first: the least work is redone.
        """
        retracted = []
        while len(self.reqs) > 1 and not self.check_decode_mem(buf_multiplier):
            victim = min(range(len(self.reqs)), key=lambda i: (len(self.reqs[i].output_ids), -i))
            req = self.reqs[victim]
            self.tree_cache.cache_finished_req(req)
            req.reset_for_retract()
            retracted.append(req)
            self.filter_batch([i for i in range(len(self.reqs)) if i != victim])
        return retracted
