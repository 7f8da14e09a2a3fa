"""A FlashInfer backend without an engine: a random cache, a table over it, and batches as a graph runner
holds them. What the native kernel says is right.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from stages.part4_worker.kernels import load_kernels
from stages.part4_worker.layers.attention.flashinfer_backend import FlashInferAttnBackend
from stages.part4_worker.model_executor.forward_batch_info import ForwardBatch, ForwardMode

Q_HEADS, KV_HEADS = 6, 2
# Mode, rows for each request, tree mask, entries planned behind the prefix, entries that three requests have.
STEPS = {
    "decode": (ForwardMode.DECODE, 1, False, 1, [1, 1, 1]),
    "verify": (ForwardMode.TARGET_VERIFY, 5, True, 5, [5, 5, 5]),
    "draft": (ForwardMode.DECODE, 4, True, 12, [4, 8, 12]),  # levels of one plan for three
    "draft extend": (ForwardMode.DRAFT_EXTEND, 4, False, 4, [1, 4, 2]),
}


class Pool:
    def __init__(self, page: int, device="cpu", dtype=torch.float32, kernels="native", head_dim=16):
        self.page, self.device, self.head_dim = page, torch.device(device), head_dim
        rows, width = 6, 512
        self.k, self.v = torch.full(
            (2, 1, (rows + 1) * width, KV_HEADS, head_dim), float("nan"), dtype=dtype, device=device
        )
        pages = torch.randperm(len(self.k[0]) // page - 1)[: rows * width // page] * page + page
        table = (pages[:, None] + torch.arange(page)).view(rows, width)
        self.k[0, :page] = self.v[0, :page] = 1.0  # padding
        self.table = table.to(device, torch.int32)
        self.backend = FlashInferAttnBackend(
            SimpleNamespace(
                kernels=load_kernels(kernels),
                token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda layer: (self.k[layer], self.v[layer])),
                req_to_token_pool=SimpleNamespace(req_to_token=self.table),
                server_args=SimpleNamespace(page_size=page, speculative_algorithm=None),
                model_config=SimpleNamespace(
                    num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim
                ),
                device=self.device,
                dtype=dtype,
            )
        )
        self.layer = SimpleNamespace(layer_id=0, scaling=head_dim**-0.5)

    def attend(self, batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        """A forward of one layer."""
        batch = replace(batch, attn_metadata=None)
        self.backend.init_forward_metadata(batch)
        return self.backend.forward(q, self.layer, batch)

    def queries(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, Q_HEADS, self.head_dim, device=self.device).to(self.k.dtype)

    def batch(self, mode: ForwardMode, bs: int, q_len: int, masked: bool) -> ForwardBatch:
        """Static tensors for requests of length 0, as a graph records them."""

        def zeros(*shape):
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        return ForwardBatch(
            mode, zeros(bs * q_len), zeros(bs * q_len), zeros(bs), zeros(bs), zeros(bs), zeros(bs * q_len),
            torch.arange(bs + 1, device=self.device) * q_len, q_len, self.backend,
            tree_mask=zeros(bs, q_len, 1) if masked else None,
        )  # fmt: skip

    def fill(
        self, batch: ForwardBatch, prefixes: list[int], tails: list[int], planned: int, q_lens=None
    ) -> np.ndarray:
        """New requests in the static tensors: KV where they have entries and NaN elsewhere. Gives the host's
        lengths, `planned` entries behind each prefix, of the requests that have any: padding comes last.
        """
        lens = torch.tensor(prefixes) + torch.tensor(tails)
        requests = torch.randperm(len(self.table))[: len(prefixes)]
        batch.req_pool_indices.copy_(requests)
        batch.prefix_lens.copy_(torch.tensor(prefixes))
        batch.seq_lens.copy_(lens)
        if q_lens is not None:
            batch.q_start_loc.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        self.k[0, self.page :] = self.v[0, self.page :] = float("nan")
        for request, n in zip(requests.tolist(), lens.tolist(), strict=True):
            for cache in (self.k[0], self.v[0]):
                shape = (n, *cache.shape[1:])
                cache[self.table[request, :n].long()] = torch.randn(shape, device=self.device).to(cache.dtype)
        if batch.tree_mask is not None:
            columns = (1 << torch.tensor(tails)) - 1
            random = torch.randint(0, 2**planned, batch.tree_mask.shape) & columns[:, None, None]
            batch.tree_mask.copy_(random | 1)  # each row sees something
        return np.array([p + planned for p, t in zip(prefixes, tails, strict=True) if t], dtype=np.int64)

    def expected(self, batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        lengths = (batch.prefix_lens, batch.seq_lens, batch.q_start_loc, batch.max_q_len)
        return load_kernels("native").attention(
            q.float(), self.k[0].float(), self.v[0].float(), self.table, batch.req_pool_indices, *lengths,
            self.layer.scaling, self.page, batch.tree_mask,
        )  # fmt: skip

    def counting(self, batch: ForwardBatch) -> torch.Tensor:
        """Bool [rows]: not of a padded request, nor behind the accepted path."""
        tails = batch.seq_lens - batch.prefix_lens
        row = torch.arange(batch.max_q_len, device=self.device)
        counts = (
            row < tails[:, None] if batch.tree_mask is None else (tails[:, None] > 0).expand(-1, len(row))
        )
        return counts.flatten()

    def check(self, batch: ForwardBatch, q: torch.Tensor, out: torch.Tensor, tolerance: float) -> None:
        """`out` is the attention of q, up to a relative error; rows that do not count may hold anything."""
        counts = self.counting(batch)
        expected, got = self.expected(batch, q)[counts], out[counts].float()
        assert torch.isfinite(got).all()
        assert (got - expected).norm() <= tolerance * expected.norm()
