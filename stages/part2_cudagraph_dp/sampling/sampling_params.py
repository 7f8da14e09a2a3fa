"""What one request asks of sampling and of its end, checked once when the request enters.

Restates sglang/srt/sampling/sampling_params.py. Upstream accepts some keys and ignores them where speculation
is on (logit_bias until #11555, min_p at v0.4.6); here a key is either honoured or refused, and nothing is
ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import regex

DEFAULT_MAX_NEW_TOKENS = 128
_LEAST_TEMPERATURE = 1e-6  # below it logits / temperature leaves float32, so it counts as zero, as upstream

# Keys of SGLang's sampling parameters that this engine does not honour, and what to do about it.
_REFUSED_KEYS = {
    "n": "send the prompt several times instead",
    "best_of": "send the prompt several times instead",
    "json_schema": "there is no grammar-constrained decoding",
    "regex": "there is no grammar-constrained decoding (stop_regex ends a text, it does not shape it)",
    "ebnf": "there is no grammar-constrained decoding",
    "structural_tag": "there is no grammar-constrained decoding",
    "skip_special_tokens": "special tokens never appear in the text; read output_ids to see them",
    "spaces_between_special_tokens": "special tokens never appear in the text; read output_ids to see them",
    "stream_interval": "every step is streamed",
    "custom_params": "there are no custom logit processors",
    "stop_str_max_len": "stop strings of any length are found",
    "stop_regex_max_len": "stop regexes are searched in the whole text",
}
# A request may state the value that is in force anyway; a script written for SGLang often does.
_HARMLESS_VALUES = {
    "n": 1,
    "best_of": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; make one with `from_dict`.

    `top_k` is -1 where it is off. `max_new_tokens` is None where only the context length ends the request.
    `logit_bias` maps a token id to a number that is added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """True where the next token is the argmax, whatever the random numbers say."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1

    @property
    def needs_counts(self) -> bool:
        """True where the logits depend on which tokens came before."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_penalties(self) -> bool:
        """True where the logits have to be changed before sampling."""
        return self.needs_counts or self.min_new_tokens > 0 or bool(self.logit_bias)

    @classmethod
    def from_dict(
        cls,
        params: Mapping[str, Any] | None,
        vocab_size: int,
    ) -> SamplingParams:
        """Check a request's dict and turn it into `SamplingParams`.

        Raises ValueError, naming key, value and what is allowed.
        """
        params = {} if params is None else params
        if not isinstance(params, Mapping):
            raise ValueError(
                f"sampling_params is a {type(params).__name__}; give a dict, e.g. {{'temperature': 0}}."
            )
        values: dict[str, Any] = {}
        for key, value in params.items():
            if key in _REFUSED_KEYS:
                if value is None or (key in _HARMLESS_VALUES and value == _HARMLESS_VALUES[key]):
                    continue
                raise ValueError(
                    f"Sampling parameter {key}={value!r} is not honoured here: {_REFUSED_KEYS[key]}."
                )
            check = _CHECKS.get(key)
            if check is None:
                near = difflib.get_close_matches(str(key), _CHECKS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(_CHECKS) + "."
                raise ValueError(f"Unknown sampling parameter {key!r}; {hint}")
            if value is None and key != "max_new_tokens":
                continue  # None means the default, as upstream
            values[key] = check(key, value, vocab_size)
        made = cls(**values)
        if made.max_new_tokens is not None and made.min_new_tokens > made.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={made.min_new_tokens} is larger than max_new_tokens={made.max_new_tokens}; "
                "lower the first or raise the second."
            )
        return made


def _number(low: float, high: float, allowed: str, open_low: bool = False):
    def check(key: str, value: Any, vocab_size: int) -> float:
        right_type = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not right_type
            or not math.isfinite(value)
            or not low <= value <= high
            or (open_low and value == low)
        ):
            raise ValueError(f"{key}={value!r} is not allowed; give {allowed}.")
        return float(value)

    return check


def _integer(key: str, value: Any, low: int, high: float, allowed: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{key}={value!r} is not allowed; give {allowed}.")
    return value


def _top_k(key: str, value: Any, vocab_size: int) -> int:
    if value == -1 and not isinstance(value, bool):
        return -1
    value = _integer(key, value, 1, math.inf, "a whole number from 1 up, or -1 to switch it off")
    return value if value < vocab_size else -1


def _max_new_tokens(key: str, value: Any, vocab_size: int) -> int | None:
    if value is None:
        return None
    return _integer(key, value, 1, math.inf, "a whole number from 1 up, or None to run to the context length")


def _min_new_tokens(key: str, value: Any, vocab_size: int) -> int:
    return _integer(key, value, 0, math.inf, "a whole number from 0 up")


def _seed(key: str, value: Any, vocab_size: int) -> int:
    return _integer(key, value, 0, 2**63 - 1, "a whole number from 0 to 2**63 - 1")


def _flag(key: str, value: Any, vocab_size: int) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is not allowed; give True or False.")
    return value


def _strings(key: str, value: Any, vocab_size: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError(
            f"{key}={value!r} is not allowed; give a string or a list of strings, none of them empty."
        )
    return tuple(strings)


def _patterns(key: str, value: Any, vocab_size: int) -> tuple[str, ...]:
    patterns = _strings(key, value, vocab_size)
    for pattern in patterns:
        try:
            compiled = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(
                f"{key}={pattern!r} is not a regular expression ({error}); mend the pattern."
            ) from None
        if compiled.search("") is not None:
            raise ValueError(
                f"{key}={pattern!r} matches the empty text, so it would stop at once; mend the pattern."
            )
    return patterns


def _token_ids(key: str, value: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"{key}={value!r} is not allowed; give a list of token ids.")
    return frozenset(_token_id(key, item, vocab_size) for item in value)


def _token_id(key: str, value: Any, vocab_size: int) -> int:
    return _integer(key, value, 0, vocab_size - 1, f"token ids from 0 to {vocab_size - 1}")


def _logit_bias(key: str, value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} is not allowed; give a dict from token id to a number.")
    bias = {}
    for token, amount in value.items():
        # SGLang's clients write the id as a string, since JSON has no other keys.
        token_id = int(token) if isinstance(token, str) and token.isdecimal() else token
        bias[_token_id(key, token_id, vocab_size)] = _number(-100, 100, "numbers from -100 to 100")(
            key, amount, vocab_size
        )
    return bias


_CHECKS = {
    "temperature": _number(0, math.inf, "a number from 0 up (0 is greedy)"),
    "top_p": _number(0, 1, "a number above 0 and at most 1", open_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1, "a number from 0 to 1"),
    "max_new_tokens": _max_new_tokens,
    "min_new_tokens": _min_new_tokens,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "stop_regex": _patterns,
    "no_stop_trim": _flag,
    "ignore_eos": _flag,
    "frequency_penalty": _number(-2, 2, "a number from -2 to 2"),
    "presence_penalty": _number(-2, 2, "a number from -2 to 2"),
    # A logit divided by much less could leave float32.
    "repetition_penalty": _number(1e-6, 2, "a number above 0 (from 1e-6 on) and at most 2"),
    "logit_bias": _logit_bias,
    "sampling_seed": _seed,
}
