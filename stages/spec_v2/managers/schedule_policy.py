"""Which waiting requests join the next prefill. Restates sglang/srt/managers/schedule_policy.py.

First come, first served. A request joins if its tokens fit the budget of one prefill and its KV, with
what it and the running requests will probably still write, fits the pool.
"""

from __future__ import annotations

import numpy as np

from .schedule_batch import Req, ScheduleBatch

# A request that may write very much is counted with this much: it will seldom write it all.
CLIP_MAX_NEW_TOKENS = 4096


class PrefillAdder:
    def __init__(
        self,
        running_batch: ScheduleBatch,
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        decode_reserve: int,
        extend_reserve: int,
    ):
        self.tree_cache = running_batch.tree_cache
        self.lookahead = self.tree_cache.lookahead
        self.allocator = running_batch.token_to_kv_pool_allocator
        self.new_token_ratio = new_token_ratio
        self.rem_input_tokens = max_prefill_tokens
        self.rem_chunk_tokens = chunked_prefill_size
        self.decode_reserve, self.extend_reserve = decode_reserve, extend_reserve
        self.alone = running_batch.is_empty()
        self.promised = sum(self._future_tokens(r) for r in running_batch.reqs)
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None

    def add_chunked_req(self, req: Req) -> bool:
        """Continue a prompt whose earlier chunks have run, before new requests; False if the pool is full."""
        req.init_next_chunk()
        chunk_end = req.kv_len + self._chunk(req) + self.extend_reserve
        need = self.allocator.new_slots(np.array([req.kv_len]), np.array([chunk_end]))
        if need > self.allocator.available_size() + self.tree_cache.evictable_size():
            return False
        self._add(req)
        return True

    def add_one_req(self, req: Req) -> bool:
        """Take `req` into the batch if it fits; False means: it and those behind it must wait."""
        if self.can_run_list and (self.rem_input_tokens <= 0 or self.rem_chunk_tokens == 0):
            return False
        req.init_next_round_input(self.tree_cache)
        extend = req.extend_end - req.kv_len
        if self.can_run_list and self.rem_chunk_tokens is None and extend > self.rem_input_tokens:
            return False
        if self._chunk(req) == 0:
            return False
        # Lock first: what this request reuses is no longer room that eviction could make.
        self.tree_cache.inc_lock_ref(req.last_node)
        if not self._has_room(req):
            self.tree_cache.dec_lock_ref(req.last_node)
            return False
        self._add(req)
        return True

    def _chunk(self, req: Req) -> int:
        """How many of a request's tokens this prefill takes; 0 if it has to wait for the next.

        What a draft reads behind a chunk has to be there: if not all tokens are taken, `lookahead` are left.
        """
        extend = req.extend_end - req.kv_len
        if self.rem_chunk_tokens is None or extend <= self.rem_chunk_tokens:
            return extend
        return max(min(self.rem_chunk_tokens, extend - self.lookahead), 0)

    def _add(self, req: Req) -> None:
        extend = self._chunk(req)
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= extend
            if req.kv_len + extend < req.extend_end:
                req.extend_end = req.kv_len + extend
                self.new_chunked_req = req
                self.rem_chunk_tokens = 0  # one prompt at a time
        self.rem_input_tokens -= extend
        self.promised += self._new_slots(req) + self._future_tokens(req)
        self.can_run_list.append(req)

    def _has_room(self, req: Req) -> bool:
        room = self.allocator.available_size() + self.tree_cache.evictable_size() - self.promised
        if self.alone and not self.can_run_list:
            # Nothing that could finish and make room: start it as long as its first step fits.
            return self._new_slots(req, self.decode_reserve) <= room
        return self._new_slots(req) + self._future_tokens(req) <= room

    def _new_slots(self, req: Req, beyond: int | None = None) -> int:
        end = req.prompt_end() + (self.extend_reserve if beyond is None else beyond)
        return self.allocator.new_slots(np.array([req.kv_len]), np.array([end]))

    def _future_tokens(self, req: Req) -> int:
        left = min(req.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        return int(left * self.new_token_ratio) + self.decode_reserve
