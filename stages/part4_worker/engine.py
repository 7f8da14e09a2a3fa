"""The one public door: load a target (and a draft head), generate.

The same subset of arguments and results as SGLang's offline `Engine` (sglang/srt/entrypoints/engine.py), so
that a script runs on either with one changed import. The scheduler runs in the caller's thread: `generate`
steps it until its own requests are done, and calls from several threads take turns stepping for all. Under DP
attention the schedulers run in processes of their own, and a step of the controller is one of all of them.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .managers.data_parallel_controller import DataParallelController
from .managers.io_struct import GenerateRequests
from .managers.schedule_batch import Req
from .managers.scheduler import Scheduler
from .models.paths import resolve_model_path
from .server_args import ServerArgs


class Engine:
    """Keywords are `ServerArgs`' fields, with upstream's names.

    Raises:
        ValueError: an unknown, contradictory or missing flag, or a model or head that cannot be used.
    """

    def __init__(self, **kwargs: Any):
        self.server_args = ServerArgs.from_kwargs(**kwargs)
        logging.getLogger(__package__).setLevel(self.server_args.log_level.upper())
        self.tokenizer = None if self.server_args.skip_tokenizer_init else load_tokenizer(self.server_args)
        door = DataParallelController if self.server_args.enable_dp_attention else Scheduler
        self.scheduler: Scheduler | DataParallelController | None = door(self.server_args)
        self._lock = threading.RLock()
        self._seeds = random.Random(self.server_args.random_seed)  # None draws a fresh one

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict | list[dict] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] = 0,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        return_hidden_states: bool = False,
        stream: bool = False,
        rid: str | list[str] | None = None,
        routed_dp_rank: int | None = None,
    ) -> dict | list[dict] | Iterator[dict]:
        """Generate for one prompt (a dict comes back) or a list of them (a list, in order).

        `stream=True` gives an iterator of cumulative dicts, one per step and request that changed; for a
        list each has an "index". Dropping the iterator aborts what it has not finished.

        Raises:
            ValueError: bad arguments; nothing is started then.
        """
        scheduler = self._alive()
        requests = GenerateRequests.from_arguments(
            self.tokenizer,
            scheduler.model_config,
            self.server_args,
            prompt=prompt,
            input_ids=input_ids,
            sampling_params=sampling_params,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            return_hidden_states=return_hidden_states,
            stream=stream,
            rid=rid,
            routed_dp_rank=routed_dp_rank,
        )
        with self._lock:
            requests.admit(scheduler, lambda: self._seeds.getrandbits(63))
        if stream:
            results = self._stream(requests)
            next(results)  # a generator that never began would not run its `finally` when dropped
            return results
        try:
            while self._step(requests):
                pass
        except BaseException:
            self._abort(requests.reqs)
            raise
        with self._lock:  # another thread's step may have ended a request and not be done with it
            results = requests.results()
        return results if requests.is_batch else results[0]

    def abort_request(self, rid: str) -> bool:
        """End a request; it keeps what it has produced. False if no live request has this id."""
        with self._lock:
            return self._alive().abort_request(rid)

    def flush_cache(self) -> bool:
        """Forget cached prefixes and counters; False, and nothing done, while requests run."""
        with self._lock:
            return self._alive().flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """Flags as resolved, pools, counters, time split, and what is really on."""
        with self._lock:
            return self.server_args.to_dict() | self._alive().get_internal_state()

    def shutdown(self) -> None:
        """Abort what runs and free the device. The engine cannot be used afterwards."""
        with self._lock:
            if self.scheduler is None:
                return
            self.scheduler.shutdown()
            self.scheduler = None
        if torch.cuda.is_available():
            gc.collect()  # workers and their graphs refer to one another
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _alive(self) -> Scheduler | DataParallelController:
        if self.scheduler is None:
            raise RuntimeError("this engine was shut down; make a new one")
        return self.scheduler

    def _step(self, requests: GenerateRequests) -> bool:
        """Run a step of the scheduler; False if `requests` needed none, for all of them have ended."""
        with self._lock:
            if requests.finished():  # perhaps by another thread's step
                return False
            scheduler = self._alive()
            try:
                if not scheduler.step() and not requests.finished():
                    raise RuntimeError("requests are waiting but the scheduler finds nothing to run")
            except BaseException as error:
                # A step that broke off leaves pools and rows in no known state: start them afresh.
                scheduler.abort_all(f"the step failed: {type(error).__name__}: {error}")
                scheduler.reset()
                raise
            return True

    def _abort(self, reqs: list[Req]) -> None:
        with self._lock:
            if self.scheduler is not None:
                for req in reqs:
                    self.scheduler.abort_req(req)

    def _stream(self, requests: GenerateRequests) -> Iterator[dict]:
        seen = [0] * len(requests.reqs)
        try:
            yield {}  # taken by `generate`
            while not all(requests.reported):
                for i, req in enumerate(requests.reqs):
                    with self._lock:  # a step of another thread writes what a result is made of
                        if len(req.output_ids) == seen[i] and (requests.reported[i] or not req.finished()):
                            continue
                        seen[i] = len(req.output_ids)
                        requests.reported[i] = req.finished()
                        result = requests.result(req)
                    yield result | ({"index": i} if requests.is_batch else {})
                self._step(requests)
        finally:
            self._abort(requests.reqs)


def load_tokenizer(server_args: ServerArgs) -> Any:
    from transformers import AutoTokenizer

    path = resolve_model_path(server_args.tokenizer_path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ValueError(
            f"no tokenizer could be loaded from {path} ({type(error).__name__}: {error}); "
            "give tokenizer_path, or skip_tokenizer_init=True and input_ids"
        ) from error
