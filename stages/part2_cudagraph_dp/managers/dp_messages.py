"""What travels between the caller's process and a rank: plain data in both directions.

A request goes out whole, once. What comes back is its progress: the tokens and scores that it has got since
the last time, so that the caller's copy of the request grows as the rank's own does. (Upstream's messages are
in sglang/srt/managers/io_struct.py.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..configs.model_config import ModelConfig
from ..sampling.sampling_params import SamplingParams
from .detokenizer import IncrementalDetokenizer
from .schedule_batch import FinishReason, Logprobs, Req

# Fields of Logprobs that grow with the request.
_SCORES = ("input_token", "input_top", "input_ids", "output_token", "output_top", "output_ids")


def pack_request(req: Req) -> dict[str, Any]:
    """A request that has not begun, for `unpack_request`."""
    scores = req.logprobs
    return {
        "rid": req.rid,
        "input_ids": req.origin_input_ids,
        "sampling_params": dataclasses.asdict(req.sampling_params),
        "seed": req.seed,
        "logprobs": None if scores is None else (scores.start_len, scores.top_num, scores.token_ids),
        "return_hidden_states": req.return_hidden_states,
    }


def unpack_request(message: dict[str, Any], config: ModelConfig, tokenizer: Any) -> Req:
    """The rank's own request. It reads its text only where a stop has to be found in it."""
    sampling = SamplingParams(**message["sampling_params"])
    detokenizer = None
    if sampling.stop or sampling.stop_regex:
        detokenizer = IncrementalDetokenizer(
            tokenizer, sampling.stop, sampling.stop_regex, sampling.no_stop_trim
        )
    return Req(
        rid=message["rid"],
        origin_input_ids=message["input_ids"],
        sampling_params=sampling,
        seed=message["seed"],
        eos_token_ids=config.eos_token_ids,
        context_length=config.context_len,
        detokenizer=detokenizer,
        logprobs=None if message["logprobs"] is None else Logprobs(*message["logprobs"]),
        return_hidden_states=message["return_hidden_states"],
    )


class Progress:
    """A rank's view of one request: how much of it the caller has been told."""

    def __init__(self, req: Req):
        self.req = req
        self._told = 0
        self._told_more: dict[str, int] = {}

    def news(self) -> tuple | None:
        """What the caller has not been told yet, for `take_news`; None if that is nothing."""
        req = self.req
        more = self._more() if req.logprobs is not None or req.return_hidden_states else None
        if len(req.output_ids) == self._told and not req.finished() and not more:
            return None
        tokens, self._told = req.output_ids[self._told :], len(req.output_ids)
        counts = (
            req.cached_tokens,
            req.spec_verify_ct,
            req.spec_num_proposed_drafts,
            req.spec_correct_drafts_histogram,
        )
        return tokens, counts, more, vars(req.finished_reason) if req.finished() else None

    def _more(self) -> dict[str, list]:
        lists = {"hidden_states": self.req.hidden_states}
        if self.req.logprobs is not None:
            lists |= {name: getattr(self.req.logprobs, name) for name in _SCORES}
        grown = {name: values[self._told_more.get(name, 0) :] for name, values in lists.items()}
        self._told_more = {name: len(values) for name, values in lists.items()}
        return {name: values for name, values in grown.items() if values}


def take_news(req: Req, news: tuple) -> None:
    """Bring the caller's request up to date."""
    tokens, counts, more, reason = news
    if req.detokenizer is not None:
        for token in tokens:
            req.detokenizer.append(token)
    req.output_ids += tokens
    req.cached_tokens, req.spec_verify_ct, req.spec_num_proposed_drafts, histogram = counts
    req.spec_correct_drafts_histogram = histogram
    for name, values in (more or {}).items():
        getattr(req if name == "hidden_states" else req.logprobs, name).extend(values)
    if reason is not None:
        req.finish(FinishReason(**reason))
