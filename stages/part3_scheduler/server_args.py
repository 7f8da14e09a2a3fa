"""Every flag of the engine, its checks, and which feature of a stage a flag asks for.

Restates sglang/srt/server_args.py (names and meanings) for the part of SGLang that is rebuilt here. The file
is the same in every stage: what a stage has stands in its stage.toml. Only an explicit request for a feature
that is missing is refused; a default never is, and neither is a value equal to the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arg_groups.speculative_hook import (
    MAX_DRAFT_TOKENS,
    MAX_TOPK,
    check_speculation,
    draft_capacity,
    resolve_speculation,
)

__all__ = ["FEATURES", "MAX_DRAFT_TOKENS", "PLUGIN_ALGORITHMS", "Features", "ServerArgs", "draft_capacity"]

MAX_PAGE_SIZE = 128

# Feature -> what a refusal calls it. stage.toml sorts each of them under `present` or `missing`.
FEATURES = {
    "torch_native": "the torch_native backend",
    "triton": "the triton backend",
    "flashinfer": "the flashinfer backend",
    "page": "pages of more than one token",
    "eagle": "EAGLE speculative decoding",
    "tree": "draft trees (topk above 1)",
    "page_tree": "draft trees with pages of more than one token",
    "spec_scheduler": "speculation inside the scheduler",
    "sampling_verify": "verification of trees by sampling, with its thresholds",
    "nextn": "the alias NEXTN",
    "eagle3": "EAGLE-3",
    "token_map": "the token map of the draft's head",
    "cuda_graph": "CUDA graphs",
    "dp_attention": "data-parallel attention",
    "dp_eagle": "EAGLE under data-parallel attention",
    "overlap": "overlapped scheduling",
    "standalone": "an independent draft model",
    "ngram": "n-gram drafting",
    "adaptive": "adaptive draft lengths",
    "rejection_sampling": "rejection sampling against the draft's probabilities",
    "multi_layer_eagle": "a draft module for each step",
}
_ALGORITHM_FEATURES = {
    "EAGLE": "eagle",
    "NEXTN": "nextn",
    "EAGLE3": "eagle3",
    "STANDALONE": "standalone",
    "NGRAM": "ngram",
}
# Algorithms that were registered from outside the package, where a stage has a registry: name → what raises
# ValueError for flags that it cannot do with, or None. Their own flags are not looked at here.
PLUGIN_ALGORITHMS: dict[str, Callable[[ServerArgs], None] | None] = {}
_DTYPES = {"float": "float32", "half": "float16"}

# Options of SGLang's Engine (0.4.6 to 0.5.23) that are not rebuilt here.
_SGLANG_OPTIONS = frozenset(
    """
    allow_auto_truncate api_key base_gpu_id bucket_e2e_request_latency bucket_time_to_first_token
    chat_template collect_tokens_histogram completion_template constrained_json_whitespace_pattern
    cpu_offload_gb crash_dump_folder cuda_graph_config custom_sigquit_handler custom_weight_loader
    debug_tensor_dump_inject debug_tensor_dump_input_file debug_tensor_dump_output_folder
    decode_attention_backend decode_log_interval decrypted_config_file decrypted_draft_config_file
    deepep_config deepep_mode delete_ckpt_after_loading detokenizer_worker_num disable_chunked_prefix_cache
    disable_cuda_graph_padding disable_custom_all_reduce disable_fast_image_processor
    disable_flashinfer_autotune disable_hybrid_swa_memory disable_jump_forward disable_mla
    disable_outlines_disk_cache disable_priority_preemption disable_shared_experts_fusion
    disaggregation_bootstrap_port disaggregation_decode_enable_offload_kvcache disaggregation_decode_tp
    disaggregation_ib_device disaggregation_mode disaggregation_prefill_pp disaggregation_transfer_backend
    dist_init_addr download_dir dp_ep elastic_ep_backend enable_cache_report enable_custom_logit_processor
    enable_deepep_moe enable_deterministic_inference enable_double_sparsity enable_dp_lm_head
    enable_dynamic_batch_tokenizer enable_dynamic_chunking enable_ep_moe enable_eplb
    enable_expert_distribution_metrics enable_flashinfer_allreduce_fusion enable_flashinfer_mla
    enable_flashmla enable_fp32_lm_head enable_hierarchical_cache enable_layerwise_nvtx_marker enable_lmcache
    enable_lora enable_memory_saver enable_metrics enable_mixed_chunk enable_mla enable_mscclpp
    enable_multimodal enable_nan_detection enable_nccl_nvls enable_p2p_check enable_prefill_cp
    enable_priority_scheduling enable_profile_cuda_graph enable_request_time_stats_logging
    enable_return_hidden_states enable_return_routed_experts enable_single_batch_overlap enable_symm_mem
    enable_tf32_matmul enable_tokenizer_batch_encode enable_torch_compile enable_trace
    enable_two_batch_overlap enable_unified_memory enable_weights_cpu_backup ep_dispatch_algorithm
    ep_num_redundant_experts ep_size expert_distribution_recorder_buffer_size
    expert_distribution_recorder_mode file_storage_path flashinfer_mla_disable_ragged fp4_gemm_runner_backend
    fp8_gemm_runner_backend gc_warning_threshold_secs gpu_id_step grammar_backend hicache_io_backend
    hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend hicache_storage_prefetch_policy
    hicache_write_policy host init_expert_location is_embedding json_model_override_args
    keep_mm_feature_on_device kt_cpuinfer kt_weight_path kv_cache_dtype kv_events_config load_balance_method
    load_format log_requests log_requests_level lora_backend lora_eviction_policy lora_paths
    lora_target_modules mamba_backend mamba_full_memory_ratio mamba_ssm_dtype max_lora_rank
    max_loras_per_batch max_mamba_cache_size max_queued_requests mm_attention_backend mm_process_config
    model_impl model_loader_extra_config modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
    modelopt_export_path modelopt_quant moe_a2a_backend moe_dense_tp_size moe_runner_backend
    mooncake_ib_device multi_item_scoring_delimiter nccl_port nnodes node_rank nsa_decode_backend
    nsa_prefill_backend num_continuous_decode_steps num_reserved_decode_tokens offload_group_size offload_mode
    offload_num_in_group pdlb_url port pp_async_batch_depth pp_max_micro_batch_size pp_size
    preferred_sampling_params prefill_attention_backend prefill_max_requests prefill_round_robin_balance
    priority_scheduling_preemption_threshold quantization quantization_param_path quantize_and_serve
    radix_eviction_policy reasoning_parser remote_instance_weight_loader_backend retraction_policy revision
    rl_on_policy_target rl_quant_profile sampling_backend schedule_conservativeness schedule_policy
    scheduler_recv_interval served_model_name show_time_cost skip_server_warmup sleep_on_idle sm_group_num
    soft_watchdog_timeout speculative_attention_mode speculative_draft_attention_backend
    speculative_draft_load_format speculative_draft_model_quantization speculative_draft_model_revision
    speculative_moe_a2a_backend speculative_moe_runner_backend speculative_ngram_branch_length
    speculative_ngram_max_match_window_size speculative_ngram_min_match_window_size
    speculative_skip_dp_mlp_sync speculative_use_block_verification stream_interval stream_output
    swa_full_tokens_ratio tbo_token_distribution_threshold tokenizer_backend
    tokenizer_metrics_allowed_custom_labels tokenizer_mode tokenizer_worker_num tool_call_parser tool_server
    torch_compile_max_bs torchao_config triton_attention_num_kv_splits triton_attention_reduce_in_fp32
    trust_remote_code uno_lora_path warmups watchdog_timeout weight_loader_disable_mmap weight_version
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Features:
    """What one stage has. `missing` maps a feature to the name of the stage that brings it."""

    stage: str
    present: frozenset[str]
    missing: dict[str, str]

    @classmethod
    def load(cls, path: str | Path | None = None) -> Features:
        """Read stage.toml, by default the one beside this file; ValueError where a feature is not sorted."""
        path = Path(path) if path else Path(__file__).with_name("stage.toml")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        present = frozenset(table["features"]["present"])
        missing = {name: entry["arrives"] for name, entry in table["features"].get("missing", {}).items()}
        wrong = (present & set(missing)) | ((present | set(missing)) ^ set(FEATURES))
        if wrong:
            raise ValueError(
                f"{path} must name each feature once, as present or missing; mend: {sorted(wrong)}."
            )
        return cls(table["name"], present, missing)

    def has(self, feature: str) -> bool:
        return feature in self.present

    def require(self, feature: str, flag: str, value: Any) -> None:
        """Raise ValueError, naming the stage that brings the feature, unless it is here."""
        if feature in self.present:
            return
        arrives = self.missing[feature]
        where = "it is not yet in this stage" if arrives == self.stage else f"it arrives in {arrives}"
        raise ValueError(
            f"fledge's {self.stage} does not have {FEATURES[feature]}, which {flag}={value!r} asks for: "
            f"{where}; leave the flag out."
        )


@dataclasses.dataclass(frozen=True)
class ServerArgs:
    """Checked flags of one engine; make one with `from_kwargs`. Names and meanings are SGLang's.

    `chunked_prefill_size`, `max_total_tokens` and `context_length` are None where nothing was asked.
    With an algorithm that drafts by a model, `speculative_num_steps`, `speculative_eagle_topk` and
    `speculative_num_draft_tokens` are always numbers; without one they are None unless given.
    """

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    device: str | None = None
    dtype: str = "auto"
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_token_map: str | None = None
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    speculative_use_rejection_sampling: bool = False
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | None = None
    speculative_ngram_min_bfs_breadth: int = 1
    speculative_ngram_max_bfs_breadth: int = 10
    speculative_ngram_match_type: str = "BFS"
    speculative_ngram_max_trie_depth: int = 18
    speculative_ngram_capacity: int = 10_000_000
    enable_multi_layer_eagle: bool = False
    page_size: int = 1
    max_total_tokens: int | None = None
    # Upstream's number under EAGLE; plain decoding has it too, so that the two compare.
    max_running_requests: int = 48
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = None
    mem_fraction_static: float | None = None  # of a GPU's memory 0.85, of a CPU's 0.1
    context_length: int | None = None
    attention_backend: str | None = None
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_bs: tuple[int, ...] | None = None
    cuda_graph_max_bs: int | None = None
    disable_overlap_schedule: bool = False
    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    dist_timeout: int | None = None
    random_seed: int | None = None
    log_level: str = "error"
    features: Features = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def from_kwargs(cls, features: Features | None = None, **kwargs: Any) -> ServerArgs:
        """Check `Engine`'s keywords and fill what follows from them. None stands for the default.

        Raises ValueError with one sentence that names the flag, its value and the way out.
        """
        features = features or Features.load()
        given = {}
        for name, value in kwargs.items():
            check = _CHECKS.get(name)
            if check is None:
                raise ValueError(_unknown(name))
            if value is not None:
                given[name] = check(name, value)
        if "model_path" not in given:
            raise ValueError(
                "model_path is missing; give a model's folder, a name in the cache, or a hub id."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, feature in _requests(given, defaults):
            features.require(feature, name, kwargs[name])
        values = {**defaults, **given}
        asked = {name: value for name, value in given.items() if value != defaults[name]}
        check_speculation(values, asked, PLUGIN_ALGORITHMS)
        _check_relations(values)
        _resolve_device(values, features)
        resolve_speculation(values, features.has, PLUGIN_ALGORITHMS)
        values["features"] = features
        values["tokenizer_path"] = values["tokenizer_path"] or values["model_path"]
        args = cls(**values)
        if (validate := PLUGIN_ALGORITHMS.get(args.speculative_algorithm)) is not None:
            validate(args)
        return args

    @property
    def cuda_graph(self) -> bool:
        """True where CUDA graphs are on. Without a GPU padding only costs, so there they must be asked for.

        The reference backend reads lengths back, which no graph on a GPU can hold.
        """
        asked_for = self.cuda_graph_bs is not None or self.cuda_graph_max_bs is not None
        useful = self.attention_backend != "torch_native" if self.device == "cuda" else asked_for
        return self.features.has("cuda_graph") and not self.disable_cuda_graph and useful

    @property
    def overlap_schedule(self) -> bool:
        """True where the overlapped scheduler is really on."""
        return self.features.has("overlap") and not self.disable_overlap_schedule

    def to_dict(self) -> dict[str, Any]:
        """The flags as plain values, for `get_server_info`."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "features")
        return {name: getattr(self, name) for name in names}


def _requests(given: dict[str, Any], defaults: dict[str, Any]):
    """Yield (flag, feature) for every feature that the given values ask for."""
    for name, value in given.items():
        if value == defaults.get(name):
            continue
        if name == "speculative_algorithm":
            if value not in PLUGIN_ALGORITHMS:
                yield name, _ALGORITHM_FEATURES[value]
        elif name == "attention_backend":
            yield name, value
        elif name.startswith("speculative_accept_threshold"):
            yield name, "sampling_verify"
        elif name.startswith("speculative_ngram_"):
            yield name, "ngram"
        elif name.startswith("speculative_adaptive"):
            yield name, "adaptive"
        elif name == "speculative_eagle_topk" and value > 1:
            yield name, "tree"
            if given.get("page_size", 1) > 1:
                yield name, "page_tree"
        elif name in _FLAG_FEATURES:
            yield name, _FLAG_FEATURES[name]
        if given.get("speculative_algorithm") is not None:
            if name == "enable_dp_attention":
                yield name, "dp_eagle"
            elif name in ("chunked_prefill_size", "max_prefill_tokens"):
                yield name, "spec_scheduler"


def _check_relations(values: dict[str, Any]) -> None:
    """Refuse flags that contradict one another."""
    if values["disable_cuda_graph"]:
        for name in ("cuda_graph_bs", "cuda_graph_max_bs"):
            if values[name] is not None:
                raise ValueError(
                    f"{name}={values[name]!r} contradicts disable_cuda_graph=True; leave one of them out."
                )
    tp_size, dp_size = values["tp_size"], values["dp_size"]
    if values["enable_dp_attention"]:
        if tp_size != dp_size:
            raise ValueError(
                f"enable_dp_attention needs tp_size equal to dp_size, and they are {tp_size} and {dp_size}; "
                "set both to the number of ranks."
            )
    elif dp_size > 1 or tp_size > 1:
        name, value = ("dp_size", dp_size) if dp_size > 1 else ("tp_size", tp_size)
        raise ValueError(
            f"{name}={value} alone is not supported; ranks are used for data-parallel attention only, so set "
            "tp_size and dp_size to the same number with enable_dp_attention=True, or leave both out."
        )
    if values["dist_timeout"] is not None and not values["enable_dp_attention"]:
        raise ValueError(
            f"dist_timeout={values['dist_timeout']} is about ranks, and without enable_dp_attention there "
            "are none; leave it out."
        )


def _resolve_device(values: dict[str, Any], features: Features) -> None:
    """Choose device and attention backend, and refuse a device that this machine lacks."""
    import torch

    has_cuda = torch.cuda.is_available()
    if values["device"] is None:
        values["device"] = "cuda" if has_cuda else "cpu"
    elif values["device"] == "cuda" and not has_cuda:
        raise ValueError("device='cuda' but torch finds no GPU here; use device='cpu' or leave device out.")
    if values["attention_backend"] is None:
        wanted = "triton" if values["device"] == "cuda" else "torch_native"
        values["attention_backend"] = wanted if features.has(wanted) else "torch_native"
    asked_for = [name for name in ("cuda_graph_bs", "cuda_graph_max_bs") if values[name] is not None]
    if asked_for and values["device"] == "cuda" and values["attention_backend"] == "torch_native":
        raise ValueError(
            f"{asked_for[0]}={values[asked_for[0]]!r} asks for CUDA graphs, and attention_backend="
            "'torch_native' reads lengths back, which no graph can hold; use 'triton' or leave it out."
        )
    if values["attention_backend"] == "flashinfer":
        if values["device"] != "cuda":
            raise ValueError("attention_backend='flashinfer' needs a GPU; use 'torch_native' on a CPU.")
        if importlib.util.find_spec("flashinfer") is None:
            raise ValueError(
                "attention_backend='flashinfer' needs the package flashinfer-python, which is not installed; "
                "pip install '.[gpu]' brings it, or use 'triton'."
            )
    if values["attention_backend"] == "triton":
        from .kernels import check_device

        check_device("triton", values["device"])


def _unknown(name: str) -> str:
    """The sentence for a keyword that is no flag."""
    if name in _SGLANG_OPTIONS or name.startswith(("disaggregation_", "hicache_", "lora_", "mamba_")):
        return f"{name} is an SGLang option fledge does not have: leave it out here."
    near = difflib.get_close_matches(name, _CHECKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(_CHECKS) + "."
    return f"Unknown engine option {name!r}; {hint}"


def _text(name: str, value: Any) -> str:
    value = str(value) if isinstance(value, Path) else value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r} is not allowed; give a non-empty string.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed; give True or False.")
    return value


def _one_of(*allowed: str, also: dict[str, str] | None = None):
    aliases = also or {}

    def check(name: str, value: Any) -> str:
        value = aliases.get(value, value) if isinstance(value, str) else value
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} is not allowed; choose one of {', '.join((*allowed, *aliases))}."
            )
        return value

    return check


def _whole(low: int, high: float = math.inf, off: int | None = None):
    """A whole number from `low` to `high`; `off` is one more value that stands for None."""

    def check(name: str, value: Any) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool):
            if value == off:
                return None
            if low <= value <= high:
                return value
        limits = f"from {low} up" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r} is not allowed; give a whole number {limits}.")

    return check


def _fraction(name: str, value: Any, low_open: bool = True, high_open: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1 or (low_open and value == 0) or (high_open and value == 1):
        limits = "above 0" if low_open else "from 0", "below 1" if high_open else "at most 1"
        raise ValueError(f"{name}={value!r} is not allowed; give a number {limits[0]} and {limits[1]}.")
    return float(value)


def _page_size(name: str, value: Any) -> int:
    right_type = isinstance(value, int) and not isinstance(value, bool)
    if not right_type or not 1 <= value <= MAX_PAGE_SIZE or value & (value - 1):
        raise ValueError(f"{name}={value!r} is not allowed; give a power of two from 1 to {MAX_PAGE_SIZE}.")
    return value


def _batch_sizes(name: str, value: Any) -> tuple[int, ...]:
    right_type = isinstance(value, (list, tuple)) and len(value) > 0
    if not right_type or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value
    ):
        raise ValueError(f"{name}={value!r} is not allowed; give a list of whole numbers from 1 up.")
    return tuple(sorted(set(value)))


def _algorithm(name: str, value: Any) -> str:
    upper = value.upper() if isinstance(value, str) else value
    known = (*_ALGORITHM_FEATURES, *PLUGIN_ALGORITHMS)
    if upper not in known:
        raise ValueError(f"{name}={value!r} is not rebuilt here; choose one of {', '.join(known)}.")
    return upper


_FLAG_FEATURES = {
    "page_size": "page",
    "speculative_token_map": "token_map",
    "speculative_use_rejection_sampling": "rejection_sampling",
    "enable_multi_layer_eagle": "multi_layer_eagle",
    "cuda_graph_bs": "cuda_graph",
    "cuda_graph_max_bs": "cuda_graph",
    "enable_dp_attention": "dp_attention",
    "dist_timeout": "dp_attention",
}
_CHECKS = {
    "model_path": _text,
    "tokenizer_path": _text,
    "skip_tokenizer_init": _flag,
    "device": _one_of("cpu", "cuda"),
    "dtype": _one_of("auto", "float32", "bfloat16", "float16", also=_DTYPES),
    "speculative_algorithm": _algorithm,
    "speculative_draft_model_path": _text,
    "speculative_num_steps": _whole(1, MAX_DRAFT_TOKENS - 1),
    "speculative_eagle_topk": _whole(1, MAX_TOPK),
    "speculative_num_draft_tokens": _whole(2, MAX_DRAFT_TOKENS),
    "speculative_token_map": _text,
    "speculative_accept_threshold_single": _fraction,
    "speculative_accept_threshold_acc": _fraction,
    "speculative_use_rejection_sampling": _flag,
    "speculative_adaptive": _flag,
    "speculative_adaptive_config": _text,
    "speculative_ngram_min_bfs_breadth": _whole(1),
    "speculative_ngram_max_bfs_breadth": _whole(1),
    "speculative_ngram_match_type": _one_of("BFS", "PROB"),
    "speculative_ngram_max_trie_depth": _whole(2, 256),
    "speculative_ngram_capacity": _whole(1, 2**31 - 1),
    "enable_multi_layer_eagle": _flag,
    "page_size": _page_size,
    "max_total_tokens": _whole(1),
    "max_running_requests": _whole(1, 1_000_000),
    "max_prefill_tokens": _whole(1),
    "chunked_prefill_size": _whole(1, off=-1),
    "mem_fraction_static": lambda name, value: _fraction(name, value, high_open=True),
    "context_length": _whole(1),
    "attention_backend": _one_of("torch_native", "triton", "flashinfer"),
    "disable_radix_cache": _flag,
    "disable_cuda_graph": _flag,
    "cuda_graph_bs": _batch_sizes,
    "cuda_graph_max_bs": _whole(1),
    "disable_overlap_schedule": _flag,
    "tp_size": _whole(1),
    "dp_size": _whole(1),
    "enable_dp_attention": _flag,
    "dist_timeout": _whole(1),
    "random_seed": _whole(0, 2**63 - 1),
    "log_level": _one_of("debug", "info", "warning", "error", "critical"),
}
