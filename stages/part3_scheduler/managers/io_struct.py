"""From `generate`'s arguments to requests, and from requests to results.

Restates sglang/srt/managers/io_struct.py and the result dicts of tokenizer_manager.py. Every argument of
every prompt is checked before any request is admitted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..configs.model_config import ModelConfig
from ..sampling.sampling_params import SamplingParams
from ..server_args import ServerArgs
from .detokenizer import IncrementalDetokenizer, decode_batch
from .schedule_batch import Logprobs, Req

if TYPE_CHECKING:
    from .scheduler import Scheduler

MAX_TOP_LOGPROBS = 64


@dataclass
class GenerateRequests:
    """The requests of one `generate` call."""

    tokenizer: Any
    is_batch: bool
    reqs: list[Req]
    is_speculative: bool
    reported: list[bool] = field(default_factory=list)  # streaming: whether the final dict went out

    @classmethod
    def from_arguments(
        cls,
        tokenizer: Any,
        model_config: ModelConfig,
        server_args: ServerArgs,
        *,
        prompt: str | list[str] | None,
        input_ids: list[int] | list[list[int]] | None,
        sampling_params: dict | list[dict] | None,
        return_logprob: bool | list[bool],
        logprob_start_len: int | list[int] | None,
        top_logprobs_num: int | list[int],
        token_ids_logprob: list[int] | list[list[int]] | None,
        return_hidden_states: bool,
        stream: bool,
        rid: str | list[str] | None,
        routed_dp_rank: int | None,
    ) -> GenerateRequests:
        """Raises ValueError, naming the prompt by number where there are several."""
        if routed_dp_rank is not None:
            _check_rank(routed_dp_rank, server_args.dp_size)
        for name, value in (("return_hidden_states", return_hidden_states), ("stream", stream)):
            _check_flag(name, value)
        ids, is_batch = _token_ids(tokenizer, prompt, input_ids)
        count = len(ids)
        params = _per_prompt("sampling_params", sampling_params, count, list)
        want_logprob = _per_prompt("return_logprob", return_logprob, count, list)
        start = _per_prompt(
            "logprob_start_len", -1 if logprob_start_len is None else logprob_start_len, count, list
        )
        top_num = _per_prompt("top_logprobs_num", top_logprobs_num, count, list)
        if not isinstance(token_ids_logprob, (list, tuple, type(None))):
            raise ValueError(f"token_ids_logprob={token_ids_logprob!r}: give a list of token ids")
        nested = bool(token_ids_logprob) and isinstance(token_ids_logprob[0], (list, tuple, type(None)))
        scored_ids = _per_prompt(
            "token_ids_logprob", token_ids_logprob, count, (list, tuple) if nested else ()
        )
        if not any(want_logprob):
            asked = {
                "logprob_start_len": start != [-1] * count,
                "top_logprobs_num": any(top_num),
                "token_ids_logprob": any(scored_ids),
            }
            if names := [name for name, is_asked in asked.items() if is_asked]:
                raise ValueError(f"{', '.join(names)} without return_logprob=True would do nothing: add it")
        rids = _per_prompt("rid", rid, count, list)
        reqs = []
        for i in range(count):
            try:
                reqs.append(
                    _make_req(
                        tokenizer, model_config, ids[i], params[i], want_logprob[i], start[i], top_num[i],
                        scored_ids[i], return_hidden_states, stream, rids[i],
                    )
                )  # fmt: skip
            except ValueError as error:
                raise ValueError(f"prompt {i}: {error}" if is_batch else str(error)) from None
        if len({r.rid for r in reqs}) < count:
            raise ValueError("rid: two prompts of the call have the same id")
        for req in reqs:
            req.routed_dp_rank = routed_dp_rank
        return cls(tokenizer, is_batch, reqs, server_args.speculative_algorithm is not None, [False] * count)

    def admit(self, scheduler: Scheduler, new_seed: Callable[[], int]) -> None:
        """Give the requests to a scheduler, or to whatever stands in its place behind the same door."""
        live = scheduler.live_rids()
        for req in self.reqs:
            if req.rid in live:
                raise ValueError(f"rid {req.rid!r} belongs to a request that still runs: choose another")
        for req in self.reqs:
            if req.seed is None:
                req.seed = new_seed()
            scheduler.add_request(req)

    def finished(self) -> bool:
        return all(r.finished() for r in self.reqs)

    def results(self) -> list[dict[str, Any]]:
        """`result` of every request."""
        return [self._result(req, text) for req, text in zip(self.reqs, self._texts(self.reqs), strict=True)]

    def result(self, req: Req) -> dict[str, Any]:
        """What upstream's `generate` returns for one request, as far as it has got."""
        return self._result(req, *self._texts([req]))

    def _result(self, req: Req, text: str | None) -> dict[str, Any]:
        end = req.finished_time or time.perf_counter()
        completion = len(req.output_ids)
        meta: dict[str, Any] = {
            "id": req.rid,
            "finish_reason": req.finished_reason.to_json() if req.finished() else None,
            "prompt_tokens": len(req.origin_input_ids),
            "completion_tokens": completion,
            "cached_tokens": req.cached_tokens or 0,
            "e2e_latency": end - req.created_time,
        }
        if self.is_speculative:
            rounds = req.spec_verify_ct  # none yet where the prefill's token ended the request
            meta |= {
                "spec_verify_ct": rounds,
                "spec_accept_length": completion / rounds if rounds else 0.0,
                "spec_num_correct_drafts": sum(
                    n * c for n, c in enumerate(req.spec_correct_drafts_histogram)
                ),
                "spec_num_proposed_drafts": req.spec_num_proposed_drafts,
                "spec_correct_drafts_histogram": list(req.spec_correct_drafts_histogram),
                "tokens_per_round": (completion - 1) / rounds if rounds else 0.0,
            }
        if (scores := req.logprobs) is not None:
            meta["output_token_logprobs"] = list(scores.output_token)
            meta["input_token_logprobs"] = scores.with_first(req.origin_input_ids)
            if scores.top_num:
                meta["output_top_logprobs"] = list(scores.output_top)
                meta["input_top_logprobs"] = [None, *scores.input_top]
            if scores.token_ids:
                meta["output_token_ids_logprobs"] = list(scores.output_ids)
                meta["input_token_ids_logprobs"] = [None, *scores.input_ids]
        if req.return_hidden_states:
            meta["hidden_states"] = [row.tolist() for row in req.hidden_states]
        return {"text": text, "output_ids": list(req.output_ids), "meta_info": meta}

    def _texts(self, reqs: list[Req]) -> list[str | None]:
        if self.tokenizer is None:
            return [None] * len(reqs)
        shown = [self._shown(req) for req in reqs]
        decoded = iter(decode_batch(self.tokenizer, [ids for ids in shown if not isinstance(ids, str)]))
        return [text if isinstance(text, str) else next(decoded) for text in shown]

    def _shown(self, req: Req) -> str | list[int]:
        """A request's text where it has been made already, else the tokens that it is made of."""
        reason = req.finished_reason
        stopped_by_token = reason is not None and isinstance(reason.matched, int)
        if stopped_by_token and not req.sampling_params.no_stop_trim:
            return req.output_ids[:-1]
        if req.detokenizer is not None:
            return req.detokenizer.final_text() if req.finished() else req.detokenizer.stream_text()
        return req.output_ids


def _token_ids(tokenizer: Any, prompt: Any, input_ids: Any) -> tuple[list[list[int]], bool]:
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids, and not both")
    for name, value in (("prompt", prompt), ("input_ids", input_ids)):
        if value is not None and not isinstance(value, (str, list, tuple)):
            raise ValueError(f"{name} must be one prompt or a list of them, not {type(value).__name__}")
    if input_ids is not None:
        is_batch = len(input_ids) > 0 and not _is_whole(input_ids[0])
        rows = input_ids if is_batch else [input_ids]
        if wrong := [ids for ids in rows if not isinstance(ids, (list, tuple))]:
            raise ValueError(f"input_ids must be token ids or lists of them, {wrong[0]!r} is neither")
        return [list(ids) for ids in rows], is_batch
    if tokenizer is None:
        raise ValueError("prompt is text, but skip_tokenizer_init=True loaded no tokenizer: give input_ids")
    is_batch = not isinstance(prompt, str)
    prompts = list(prompt) if is_batch else [prompt]
    if wrong := [p for p in prompts if not isinstance(p, str)]:
        raise ValueError(f"prompt must be text or a list of texts, not {type(wrong[0]).__name__}")
    try:
        return [tokenizer.encode(p) for p in prompts], is_batch
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair is no text
        raise ValueError(f"prompt cannot be encoded ({error}): is it valid Unicode?") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_rank(rank: Any, dp_size: int) -> None:
    if not _is_whole(rank) or not 0 <= rank < dp_size:
        ranks = f"ranks 0 to {dp_size - 1}" if dp_size > 1 else "one rank, 0"
        raise ValueError(f"routed_dp_rank={rank!r}, but this engine has {ranks}: name one or leave it out")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")


def _per_prompt(name: str, value: Any, count: int, many: type | tuple) -> list:
    """One value per prompt: `value` itself if it is of a type in `many`, else the same for all."""
    if not isinstance(value, many):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} has {len(value)} entries for {count} prompts: give one for all, or one each"
        )
    return list(value)


def _make_req(
    tokenizer: Any, config: ModelConfig, ids: list[int], params: dict, want_logprob: bool, start: int,
    top_num: int, scored_ids: list[int] | None, return_hidden_states: bool, stream: bool, rid: str | None,
) -> Req:  # fmt: skip
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if bad := [t for t in ids if not _is_whole(t) or not 0 <= t < config.vocab_size]:
        raise ValueError(f"input_ids holds {bad[0]!r}, the vocabulary has ids 0 to {config.vocab_size - 1}")
    if len(ids) >= config.context_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the context holds {config.context_len}, one at least for "
            "the answer: shorten the prompt or raise context_length"
        )
    if rid is not None and not isinstance(rid, str):
        raise ValueError(f"rid={rid!r}: give a text")
    _check_flag("return_logprob", want_logprob)
    sampling = SamplingParams.from_dict(params, config.vocab_size)
    has_stop_text = bool(sampling.stop or sampling.stop_regex)
    if has_stop_text and tokenizer is None:
        raise ValueError(
            "stop and stop_regex need text, and skip_tokenizer_init=True loaded no tokenizer: "
            "use stop_token_ids"
        )
    detokenizer = None
    if tokenizer is not None and (has_stop_text or stream):
        detokenizer = IncrementalDetokenizer(
            tokenizer, sampling.stop, sampling.stop_regex, sampling.no_stop_trim
        )
    logprobs = None
    if want_logprob:
        logprobs = _make_logprobs(config, len(ids), start, top_num, scored_ids)
    return Req(
        rid=rid if rid is not None else uuid.uuid4().hex,
        origin_input_ids=ids,
        sampling_params=sampling,
        seed=sampling.sampling_seed,
        eos_token_ids=config.eos_token_ids,
        context_length=config.context_len,
        detokenizer=detokenizer,
        logprobs=logprobs,
        return_hidden_states=return_hidden_states,
    )


def _make_logprobs(
    config: ModelConfig, prompt_len: int, start: int, top_num: int, scored_ids: list[int] | None
) -> Logprobs:
    if not _is_whole(start) or not -1 <= start < prompt_len:
        raise ValueError(
            f"logprob_start_len={start!r} lies outside the prompt of {prompt_len} tokens (-1: score none)"
        )
    most = min(MAX_TOP_LOGPROBS, config.vocab_size)
    if not _is_whole(top_num) or not 0 <= top_num <= most:
        raise ValueError(f"top_logprobs_num={top_num!r}: give a number from 0 to {most}")
    if bad := [t for t in scored_ids or [] if not _is_whole(t) or not 0 <= t < config.vocab_size]:
        raise ValueError(
            f"token_ids_logprob holds {bad[0]!r}, the vocabulary has ids 0 to {config.vocab_size - 1}"
        )
    return Logprobs(prompt_len - 1 if start == -1 else start, top_num, list(scored_ids or []))
