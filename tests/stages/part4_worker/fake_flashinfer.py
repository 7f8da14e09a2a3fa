"""FlashInfer 0.6.6 as far as the backend uses it, in plain PyTorch, so that planning is tested without a GPU.

It is strict where the library is lenient or would be silently wrong: lengths must be planned from the host,
`run` fails if the device's arrays are not the ones that were planned, and a slot that nobody sees still takes
part in the sum with weight 0, as in a tile of the real kernel, so that NaN in it spoils the row.
"""

from __future__ import annotations

from types import ModuleType

import torch

__version__ = "0.6.6"
plans: list[tuple[str, list[int]]] = []  # kind of wrapper, planned KV lengths; tests empty it


def install(monkeypatch) -> ModuleType:
    """Make `import flashinfer` give this module."""
    import sys

    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    plans.clear()
    return module


def _host(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.device.type == "cpu" and tensor.dtype == torch.int32, "would be read back from the device"
    return tensor


class _Module:
    """Stands for the compiled module: `plan` leaves what `run` needs in the wrapper's workspace."""

    def __init__(self, kind: str):
        self.kind = kind

    def plan(self, float_workspace, int_workspace, pinned, *arguments):
        if self.kind == "decode":
            kv_indptr, bs, q_heads, kv_heads, page_size, graph, window, cap, qk, vo, q_like, kv_like = (
                arguments
            )
            assert window == -1 and cap == 0.0 and q_like.dtype == kv_like.dtype
            assert q_heads // kv_heads in (1, 2, 3, 4, 8), "unsupported group size"
            self.repeats = graph
            qo_indptr = torch.arange(bs + 1, dtype=torch.int32)
        else:
            (
                qo_indptr, kv_indptr, _, rows, bs, q_heads, kv_heads, page_size, graph, qk, vo, causal,
                window, split, no_split, colocated,
            ) = arguments  # fmt: skip
            assert (window, split, colocated) == (-1, -1, 0)
            # A request cut into pieces has others for another length; only `graph` pads their number.
            self.repeats = graph or no_split
            assert int(_host(qo_indptr)[-1]) <= rows
            self.causal = causal
        assert page_size == 1 and qk == vo and q_heads % kv_heads == 0
        lens = _host(kv_indptr).diff()
        assert len(lens) == bs and (lens >= 0).all()
        # The real plan goes through pinned memory into the workspace; whoever shares it overwrites it.
        self.heads = (q_heads, kv_heads)
        int_workspace.planned = (self, qo_indptr.tolist(), kv_indptr.tolist())
        plans.append((self.kind, lens.tolist()))
        return [bs, int(graph)]


class _Wrapper:
    kind: str

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._cached_module = _Module(self.kind)
        self._custom_mask_buf = self._mask_indptr_buf = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def _keep(self, name, value, used=None):
        """What plan() does with an array: into the graph's buffer, or as it is."""
        if self._use_cuda_graph:
            buffer = getattr(self, name)
            assert len(value) <= len(buffer) and (used is None or len(buffer) == used), name
            buffer[: len(value)].copy_(value)
        else:
            setattr(self, name, value.clone() if used is not None else value)

    def run(self, q, paged_kv_cache, out=None):
        module, qo, kv = self._int_workspace_buffer.planned
        assert module is self._cached_module, "another wrapper's plan lies in the shared workspace"
        assert not self._use_cuda_graph or module.repeats, "this plan's pieces would not fit a graph"
        assert self._paged_kv_indptr_buf.tolist() == kv, "the device has other lengths than were planned"
        assert self.kind == "decode" or self._qo_indptr_buf.tolist() == qo
        assert self._paged_kv_last_page_len_buf.tolist() == [1] * (len(kv) - 1)
        assert q.dtype == self._dtype and len(q) == qo[-1]
        keys, values = (t.squeeze(1).float() for t in paged_kv_cache)
        group = q.shape[1] // keys.shape[1]
        assert self._cached_module.heads == (q.shape[1], keys.shape[1])
        result = torch.zeros(q.shape)
        for b in range(len(kv) - 1):
            rows, n, s = slice(qo[b], qo[b + 1]), qo[b + 1] - qo[b], kv[b + 1] - kv[b]
            if n and s:
                slots = self._paged_kv_indices_buf[kv[b] : kv[b + 1]].long()
                key, value = (t[slots].repeat_interleave(group, 1) for t in (keys, values))
                score = torch.einsum("qhd,khd->hqk", q[rows].float(), key) * q.shape[2] ** -0.5
                score = score.masked_fill(~self._visible(b, n, s), float("-inf"))
                result[rows] = torch.einsum("hqk,khd->qhd", score.softmax(-1), value)
        out = torch.empty_like(q) if out is None else out
        return out.copy_(result)

    def _visible(self, b, n, s):
        return torch.ones(n, s, dtype=torch.bool)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    kind = "decode"

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ):
        assert not use_tensor_cores
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        bs = len(_host(last_page_len))
        assert kv_data_type == q_data_type
        self._dtype = q_data_type
        self._keep("_paged_kv_indptr_buf", _host(indptr), bs + 1)
        self._keep("_paged_kv_last_page_len_buf", last_page_len, bs)
        self._keep("_paged_kv_indices_buf", indices)
        like = torch.empty(0, dtype=q_data_type)
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer,
            indptr, bs, num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph, -1, 0.0, head_dim,
            head_dim, like, like,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        assert backend == "fa2", "fa3 knows no masks and would be compiled beside it"
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._max_total_num_rows = None

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, packed_custom_mask=None, causal=False, q_data_type="float16",
        kv_data_type=None,
    ):  # fmt: skip
        bs, rows = len(_host(qo_indptr)) - 1, int(qo_indptr[-1])
        assert kv_data_type == q_data_type and len(_host(paged_kv_indptr)) == bs + 1
        self._dtype = q_data_type
        if self._use_cuda_graph:
            self._max_total_num_rows = self._max_total_num_rows or rows
            assert rows <= self._max_total_num_rows
        self._keep("_qo_indptr_buf", qo_indptr, bs + 1)
        self._keep("_paged_kv_indptr_buf", paged_kv_indptr, bs + 1)
        self._keep("_paged_kv_last_page_len_buf", _host(paged_kv_last_page_len), bs)
        self._keep("_paged_kv_indices_buf", paged_kv_indices)
        if packed_custom_mask is not None:
            # As the library does it: in entries, although the kernel takes it for bytes.
            lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            mask_indptr = torch.zeros_like(qo_indptr)
            mask_indptr[1:] = (qo_indptr.diff() * lens).cumsum(0)
            self._keep("_custom_mask_buf", packed_custom_mask)
            self._keep("_mask_indptr_buf", mask_indptr, bs + 1)
        elif not self._use_cuda_graph:
            self._custom_mask_buf = self._mask_indptr_buf = None
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer,
            qo_indptr, paged_kv_indptr, paged_kv_indptr, self._max_total_num_rows or rows, bs, num_qo_heads,
            num_kv_heads, page_size, self._use_cuda_graph, head_dim_qk, head_dim_qk, causal, -1, -1, False, 0,
        )  # fmt: skip

    def _visible(self, b, n, s):
        if self._custom_mask_buf is None:
            if not self._cached_module.causal:
                return super()._visible(b, n, s)
            return torch.arange(s) <= s - n + torch.arange(n)[:, None]
        bit = int(self._mask_indptr_buf[b]) * 8 + torch.arange(n * s)
        return (self._custom_mask_buf[bit // 8] >> (bit % 8) & 1).bool().view(n, s)
