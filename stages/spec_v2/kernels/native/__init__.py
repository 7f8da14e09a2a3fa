"""Every kernel in plain PyTorch: the reference of its Triton twin, and what runs without a GPU."""

from ..host_metadata import HostMetadata
from .attention import attention
from .chain_verify import chain_speculative_sampling
from .embedding import embed_with_hidden, norm_embed_with_hidden
from .flat_layout import create_custom_mask, create_kv_indices
from .fused_linear import linear, linear_float32, linear_topk, norm_gate_up, norm_qkv_rotary_store
from .layers import rms_norm, rotary_store, silu_and_mul
from .random import USE_ACCEPT, USE_DRAFT, USE_SAMPLE, philox_uniform
from .req_to_token import assign_draft_cache_locs, assign_extend_cache_locs, assign_req_to_token
from .sampling import sample_from_probs
from .topk import argmax, top_k
from .tree import build_tree, grow_tree
from .verify import tree_speculative_sampling_target_only, verify_tree_greedy

__all__ = [
    "USE_ACCEPT",
    "USE_DRAFT",
    "USE_SAMPLE",
    "HostMetadata",
    "argmax",
    "assign_draft_cache_locs",
    "assign_extend_cache_locs",
    "assign_req_to_token",
    "attention",
    "build_tree",
    "chain_speculative_sampling",
    "create_custom_mask",
    "create_kv_indices",
    "embed_with_hidden",
    "grow_tree",
    "linear",
    "linear_float32",
    "linear_topk",
    "norm_embed_with_hidden",
    "norm_gate_up",
    "norm_qkv_rotary_store",
    "philox_uniform",
    "rms_norm",
    "rotary_store",
    "sample_from_probs",
    "silu_and_mul",
    "top_k",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]
