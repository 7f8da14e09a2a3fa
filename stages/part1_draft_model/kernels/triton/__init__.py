"""Every kernel in Triton, with the names and arguments of its native twin."""

from ..host_metadata import HostMetadata
from .attention import attention
from .embedding import embed_with_hidden
from .flat_layout import create_kv_indices
from .fused_linear import linear, linear_float32, norm_gate_up, norm_qkv_rotary_store
from .layers import rms_norm, rotary_store, silu_and_mul
from .lm_head import linear_topk
from .random import USE_ACCEPT, USE_SAMPLE, philox_uniform
from .req_to_token import assign_req_to_token
from .sampling import sample_from_probs
from .topk import argmax, top_k

__all__ = [
    "USE_ACCEPT",
    "USE_SAMPLE",
    "HostMetadata",
    "argmax",
    "assign_req_to_token",
    "attention",
    "create_kv_indices",
    "embed_with_hidden",
    "linear",
    "linear_float32",
    "linear_topk",
    "norm_gate_up",
    "norm_qkv_rotary_store",
    "philox_uniform",
    "rms_norm",
    "rotary_store",
    "sample_from_probs",
    "silu_and_mul",
    "top_k",
]
