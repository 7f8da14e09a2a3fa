"""What one forward pass needs, on the device. Restates sglang/srt/model_executor/forward_batch_info.py.

ScheduleBatch (the scheduler's, on the host) → ModelWorkerBatch (host arrays of one step) → ForwardBatch
(device tensors of one forward). A request contributes consecutive rows; each row is one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .device_io import upload

if TYPE_CHECKING:
    from ..layers.attention.base_backend import AttentionBackend
    from ..managers.schedule_batch import ModelWorkerBatch
    from .model_runner import ModelRunner


class ForwardMode(IntEnum):
    EXTEND = auto()  # new tokens behind a prefix that may be cached: prefill, and each chunk of it
    DECODE = auto()  # one token per request; the draft model's tree growth, `topk` per request
    IDLE = auto()  # a batch without requests: DP attention's other ranks have some
    TARGET_VERIFY = auto()  # a tree of draft tokens per request, under a tree mask
    DRAFT_EXTEND = auto()  # the draft model over the tokens a verification accepted

    def is_extend(self) -> bool:
        return self == ForwardMode.EXTEND

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE


class CaptureHiddenMode(Enum):
    NULL = auto()  # return no hidden states
    LAST = auto()  # one row per request: the one its logits come from
    FULL = auto()  # one row per token


@dataclass
class LogprobRequest:
    """Rows of an extend whose next token is scored (device tensors; see layers/logprobs.py)."""

    rows: torch.Tensor  # [n] rows of the forward
    targets: torch.Tensor  # [n] the token that follows each
    top_num: int
    token_ids: torch.Tensor  # [n, m]


@dataclass
class ForwardBatch:
    """Device tensors of one forward; int64 unless said otherwise."""

    forward_mode: ForwardMode
    input_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows] rotary positions
    req_pool_indices: torch.Tensor  # [bs] rows of req_to_token
    prefix_lens: torch.Tensor  # [bs] KV entries that every row of the request sees
    seq_lens: torch.Tensor  # [bs] KV entries once this forward has written its own
    out_cache_loc: torch.Tensor  # [rows] where this forward writes its KV
    q_start_loc: torch.Tensor  # [bs + 1] first row of each request
    max_q_len: int
    attn_backend: AttentionBackend
    # What a backend plans with on the host, [bs]: prefix and rows together. `seq_lens` is less where fewer
    # rows turn out to count, and where a draft level comes before the last. None in what a graph records.
    seq_lens_cpu: np.ndarray | None = None
    extend_seq_lens_cpu: np.ndarray | None = None  # [bs] rows of each request; None: max_q_len each
    last_rows: torch.Tensor | None = None  # [bs] rows whose logits are wanted; None: every row
    # [bs, max_q_len, words] bits over columns behind the prefix; None: causal
    tree_mask: torch.Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    # The k likeliest tokens of each row are all that is wanted, instead of its logits: 1 for greedy decoding.
    topk: int | None = None
    input_logprobs: LogprobRequest | None = None
    spec_info: Any = None  # its `hidden_states` [rows, hidden] feed a draft model
    attn_metadata: Any = field(default=None, repr=False)  # planned once per forward by the backend
    hidden_states: torch.Tensor | None = None  # what the forward captured, once it has run
    output_positions: torch.Tensor | None = None  # [bs] index of the output token that is sampled from this
    # [bs, any] that token where it need not be sampled, and those behind it; −1 where they are not known
    known_next_tokens: torch.Tensor | None = None
    # Rows that every rank of DP attention brings to this forward's gathers; None: as many as this one.
    dp_rows: int | None = None

    @classmethod
    def init_new(cls, batch: ModelWorkerBatch, model_runner: ModelRunner) -> ForwardBatch:
        """Upload an extend's arrays in one transfer. Its slots stand in the table of requests already."""
        bs = len(batch.req_pool_indices)
        counts = batch.seq_lens - batch.prefix_lens
        q_start_loc = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(bs), counts)
        positions = np.arange(len(row)) - q_start_loc[row] + batch.prefix_lens[row]
        named = {
            "input_ids": batch.input_ids,
            "positions": positions,
            "req_pool_indices": batch.req_pool_indices,
            "prefix_lens": batch.prefix_lens,
            "seq_lens": batch.seq_lens,
            "out_cache_loc": batch.out_cache_loc,
            "q_start_loc": q_start_loc,
            "output_positions": batch.output_positions,
            "known_next_tokens": batch.known_next_tokens,
        }
        logprob = batch.input_logprobs
        extra = [] if logprob is None else [logprob.rows, logprob.targets, logprob.token_ids]
        tensors = upload(
            model_runner.device,
            *named.values(),
            q_start_loc[1:] - 1,
            *extra,
        )
        fields = dict(zip(named, tensors, strict=False))
        last_rows, *extra_tensors = tensors[len(named) :]
        return cls(
            forward_mode=batch.forward_mode,
            **fields,
            max_q_len=int(counts.max(initial=0)),
            attn_backend=model_runner.attn_backend,
            seq_lens_cpu=batch.seq_lens,
            extend_seq_lens_cpu=counts,
            last_rows=last_rows,
            # A draft model is fed with the state of every row.
            capture_hidden_mode=CaptureHiddenMode.FULL
            if batch.spec_algorithm.is_eagle()
            else batch.capture_hidden_mode,
            input_logprobs=None
            if logprob is None
            else LogprobRequest(extra_tensors[0], extra_tensors[1], logprob.top_num, extra_tensors[2]),
            dp_rows=batch.global_step.target_rows,
        )

    @classmethod
    def idle(cls, model_runner: ModelRunner, dp_rows: int, spec_info: Any = None) -> ForwardBatch:
        """A forward of other ranks, taken part in with one row that is nobody's and that nobody reads.

        Like the rows that pad a batch it has length 0, and writes its KV to the padding slot.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=model_runner.device)
        return cls(
            forward_mode=ForwardMode.IDLE,
            input_ids=zero,
            positions=zero,
            req_pool_indices=zero,
            prefix_lens=zero,
            seq_lens=zero,
            out_cache_loc=zero,
            q_start_loc=torch.arange(2, device=model_runner.device),
            max_q_len=1,
            attn_backend=model_runner.attn_backend,
            topk=1,
            spec_info=spec_info,
            dp_rows=dp_rows,
        )

    def last_hidden_states(self) -> torch.Tensor:
        """The captured state behind each request's logits, [bs, hidden]."""
        if self.capture_hidden_mode == CaptureHiddenMode.FULL and self.last_rows is not None:
            return self.hidden_states[self.last_rows]
        return self.hidden_states

    def rotate_input_ids(self, next_token_ids: torch.Tensor) -> torch.Tensor:
        """The token after each row's, [rows]; after the last row of request i it is next_token_ids[i]."""
        rotated = self.input_ids.roll(-1)
        rotated[self.last_rows] = next_token_ids
        return rotated

    def for_runner(self, model_runner: ModelRunner, **changes: Any) -> ForwardBatch:
        """The same rows and slots, run by another model: how the draft follows the target."""
        return replace(self, attn_backend=model_runner.attn_backend, attn_metadata=None, **changes)
