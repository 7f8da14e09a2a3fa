"""Attention by our Triton kernels. Restates sglang/srt/layers/attention/triton_backend.py.

The kernel reads slots through the table of requests, so there is nothing to plan.
"""

from .base_backend import AttentionBackend


class TritonAttnBackend(AttentionBackend):
    pass
