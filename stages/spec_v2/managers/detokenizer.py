"""Token ids to text as they come, with stop strings found wherever they lie.

Restates sglang/srt/managers/detokenizer_manager.py and the text part of `Req.check_finished`. Upstream
decodes a tail of the output for its stop test, which misses a stop that ended several tokens before the end
of an accepted run (#23802).
"""

from __future__ import annotations

import weakref
from typing import Any

import regex

# Tokens kept for context: more than a character's bytes, and enough for a decoder's spacing rules.
_WINDOW = 8
_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_MAX_INCOMPLETE = 3  # UTF-8 needs at most 4 bytes, so at most 3 of them can be waiting
_WORD_EDGE = regex.compile(r"\\[bBmM]")

_silent_ids_of: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def _silent_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens, which never appear in the text."""
    ids = _silent_ids_of.get(tokenizer)
    if ids is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids = frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}
        _silent_ids_of[tokenizer] = ids
    return ids


def decode_batch(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """The texts of whole answers, without special tokens.

    A fast tokenizer spreads a batch over the cores, which `transformers` does not ask it to. While texts are
    made the device has nothing to do.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.decode_batch(rows, skip_special_tokens=True)
    return [
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in rows
    ]


class IncrementalDetokenizer:
    """The text of one request.

    Args:
        tokenizer: a `transformers` tokenizer.
        stop: stop strings.
        stop_regex: stop patterns (`regex` module).
        no_stop_trim: keep the stop, and what follows it in its token, in the final text.

    Only a window of a few tokens is decoded for each new one, so the cost of a token does not grow with the
    output. (A pattern that can match from the start of the text, like `.*x`, is searched from there each
    time.)
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...] = (),
        stop_regex: tuple[str, ...] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.patterns = tuple(regex.compile(pattern) for pattern in stop_regex)
        self.no_stop_trim = no_stop_trim
        self.matched: str | None = None
        self._silent = _silent_ids(tokenizer)
        # A stop string may spell a special token, which the text does not show.
        self._special_stops = {}
        for text in self.stop:
            token_id = tokenizer.convert_tokens_to_ids(text)
            if token_id in self._silent and tokenizer.convert_ids_to_tokens(token_id) == text:
                self._special_stops[token_id] = text
        self._known = len(tokenizer)
        # Decoders with byte tokens show a whole run of them as broken until its last character is complete.
        is_byte_fallback = tokenizer.convert_tokens_to_ids("<0xE2>") not in (None, tokenizer.unk_token_id)
        self._max_incomplete = None if is_byte_fallback else _MAX_INCOMPLETE
        self._text = ""  # what can change no more
        self._tail = ""  # what an incomplete character would show as if nothing followed
        self._window: list[int] = []
        self._window_start = 0  # where in the text the window's decoding begins
        self._fresh: list[int] = []  # appended, not yet decoded
        self._cut = 0  # where the stop begins, once one has matched
        self._search_from = [0] * len(self.patterns)
        self._searched = 0  # length of the text in which no stop string ends

    def append(self, token_id: int) -> str | None:
        """Add one output token; return the stop string, or the text that matched a stop regex, or None.

        Of several matches the one that begins first counts, and of those the shortest. Tokens after a match
        are ignored.
        """
        if self.matched is not None:
            return self.matched
        if token_id in self._silent or token_id >= self._known:
            if token_id in self._special_stops:
                self._decode()
                self._cut, self.matched = len(self._text), self._special_stops[token_id]
            return self.matched
        self._fresh.append(token_id)
        if self.stop or self.patterns:
            self._decode()
            self._search()
        return self.matched

    def stream_text(self) -> str:
        """The text that is safe to show now: it only ever grows, and `final_text` begins with it.

        Held back are an incomplete character and whatever may turn out to be the beginning of a stop.
        """
        self._decode()
        if self.matched is not None:
            return self.final_text()
        return self._text[: self._safe_length()]

    def final_text(self) -> str:
        """The whole text: cut before the stop unless `no_stop_trim`, and without special tokens."""
        self._decode()
        if self.matched is not None and not self.no_stop_trim:
            return self._text[: self._cut]
        return self._text + self._tail

    def _decode(self) -> None:
        """Take the fresh tokens into the text."""
        if not self._fresh:
            return
        self._window += self._fresh
        self._fresh = []
        window_text = self._decoded(self._window)
        waiting = len(window_text) - len(window_text.rstrip(_INCOMPLETE))
        if self._max_incomplete is not None:
            waiting = min(waiting, self._max_incomplete)
        stable_end = len(window_text) - waiting
        shown = len(self._text) - self._window_start  # characters of the window that are in the text already
        self._text += window_text[shown:stable_end]
        self._tail = window_text[max(shown, stable_end) :]
        if len(self._window) > 2 * _WINDOW and (waiting == 0 or self._max_incomplete is not None):
            self._shorten_window(window_text)

    def _shorten_window(self, window_text: str) -> None:
        """Drop the window's oldest tokens, where a character begins: one of four tokens in a row does."""
        for size in range(_WINDOW, _WINDOW + _MAX_INCOMPLETE + 1):
            shorter = self._decoded(self._window[-size:])
            if window_text.endswith(shorter):
                self._window = self._window[-size:]
                self._window_start += len(window_text) - len(shorter)
                return

    def _decoded(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _search(self) -> None:
        """Look for a stop in the part of the text where one may have been completed."""
        best = None  # (begin, end)
        for stop in self.stop:
            begin = self._text.find(stop, max(0, self._searched - len(stop) + 1))
            if begin >= 0 and (best is None or (begin, begin + len(stop)) < best):
                best = (begin, begin + len(stop))
        for number, pattern in enumerate(self.patterns):
            begin = self._search_from[number]
            found = pattern.search(self._text, begin, partial=True)  # a whole match if there is one
            if found is not None and not found.partial:
                best = found.span() if best is None else min(best, found.span())
            else:
                self._search_from[number] = self._earliest_partial(pattern, found, begin)
        self._searched = len(self._text)
        if best is not None:
            self._cut = best[0]
            self.matched = self._text[best[0] : best[1]]

    def _earliest_partial(self, pattern: regex.Pattern, found: regex.Match | None, begin: int) -> int:
        """The first place where a match that more text completes can begin."""
        earliest = len(self._text) if found is None else found.start()
        if _WORD_EDGE.search(pattern.pattern):
            # At the end of the text `\b` is decided as if nothing followed, so look one character back too.
            found = pattern.search(self._text, begin, max(begin, len(self._text) - 1), partial=True)
            earliest = earliest if found is None else min(earliest, found.start())
        return earliest

    def _safe_length(self) -> int:
        """Length of the text that no stop can reach back into."""
        length = len(self._text)
        safe = min([length, *self._search_from])
        for stop in self.stop:
            for size in range(min(len(stop) - 1, length), 0, -1):
                if self._text.endswith(stop[:size]):
                    safe = min(safe, length - size)
                    break
        return safe
