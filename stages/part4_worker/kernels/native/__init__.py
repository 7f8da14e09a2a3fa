"""Every kernel in plain PyTorch: the reference of its Triton twin, and what runs without a GPU."""

from ..host_metadata import HostMetadata
from .attention import attention
from .kv_cache import assign_req_to_token, store_kv
from .layers import apply_rotary, rms_norm, silu_and_mul
from .random import USE_ACCEPT, USE_SAMPLE, philox_uniform
from .sampling import sample_from_probs
from .topk import argmax, top_k, topk_softmax
from .tree import build_tree
from .verify import tree_speculative_sampling_target_only, verify_tree_greedy

__all__ = [
    "USE_ACCEPT",
    "USE_SAMPLE",
    "HostMetadata",
    "apply_rotary",
    "argmax",
    "assign_req_to_token",
    "attention",
    "build_tree",
    "philox_uniform",
    "rms_norm",
    "sample_from_probs",
    "silu_and_mul",
    "store_kv",
    "top_k",
    "topk_softmax",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]
