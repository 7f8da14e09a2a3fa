"""A process of `fledge bench`: opens one engine after another, measures each, says so in JSON lines.

    python -m tools.bench.bench_process < JOB

JOB is one JSON object (see `run_job`). Every line on standard output is an object whose "event" is "begin",
"progress", "cell", "steady", "result" or "end"; whatever else prints goes to standard error. So the process
that started this one has every number as soon as it is measured, whatever happens afterwards.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .measure import Run, timed_run
from .prompt_sets import PromptSet, waves
from .stages_door import encode_prompts, resolve_stage
from .steady import steady

Emit = Callable[..., None]

WARM_UP_TOKENS = 4
# Of what `get_server_info()` says, what a result is kept with.
SERVER = ("attention_backend", "device", "is_on", "max_total_num_tokens", "max_running_requests", "page_size")


def run_job(job: dict[str, Any], emit: Emit) -> None:
    """Measure each of the job's "configurations" up to one that fails: a broken device stays broken.

    A configuration is {"name", "kind", …}; kind "engine" has "flags" and "batches" and reads the job's
    "stage", "sets", "new_tokens", "repeat", "seconds", "raw" and "steady"; kinds "floor" and "hf" have the
    arguments of those modules' functions under "arguments".
    """
    for configuration in job["configurations"]:
        name, start = configuration["name"], time.perf_counter()
        error = None
        try:
            if configuration["kind"] == "engine":
                measure_engine(job, configuration, emit)
            else:
                emit("begin", configuration=name)
                emit("result", configuration=name, **_other(configuration, emit))
        except Exception as found:
            traceback.print_exc()
            error = f"{type(found).__name__}: {found}"
        gc.collect()
        emit("end", configuration=name, error=error, seconds=time.perf_counter() - start)
        if error is not None:
            return


def measure_engine(job: dict[str, Any], configuration: dict[str, Any], emit: Emit) -> None:
    """Open the engine once and measure every prompt set at every batch size."""
    name, start = configuration["name"], time.perf_counter()
    emit("progress", what=f"{name}: loading")
    with resolve_stage(job["stage"]).open(**configuration["flags"]) as engine:
        info = engine.get_server_info()
        loading = time.perf_counter() - start
        server = {key: info[key] for key in SERVER}
        emit("begin", configuration=name, loading_seconds=loading, server=server)
        for entry in job["sets"]:
            prompts = PromptSet(**entry)
            new_tokens = job["new_tokens"] or prompts.new_tokens
            ids = encode_prompts(engine.tokenizer, prompts.questions, job["raw"])
            for batch in configuration["batches"]:
                groups = waves(ids, batch)
                emit("progress", what=f"{name}: {prompts.name}, batch {batch}")
                runs = _runs(job, engine, groups, new_tokens, prompts.ignore_eos)
                columns = {key: [asdict(run)[key] for run in runs] for key in asdict(runs[0])}
                emit("cell", configuration=name, set=prompts.name, batch=batch, **columns)
                if job["steady"] and prompts.ignore_eos:
                    emit("steady", configuration=name, **asdict(steady(engine, groups[0], new_tokens)))


def _runs(
    job: dict[str, Any], engine: Any, groups: list[list[list[int]]], new_tokens: int, ignore_eos: bool
) -> list[Run]:
    """Timed runs after a warm-up, at most `repeat` and none after `seconds` are over, but one at least."""
    # Every prompt once for the prefills, then the first group as long as it will be for what follows them.
    timed_run(engine, groups, min(new_tokens, WARM_UP_TOKENS), ignore_eos)
    timed_run(engine, groups[:1], new_tokens, ignore_eos)
    runs: list[Run] = []
    while len(runs) < job["repeat"] and (not runs or sum(run.seconds for run in runs) < job["seconds"]):
        gc.collect()
        runs.append(timed_run(engine, groups, new_tokens, ignore_eos)[0])
    return runs


def _other(configuration: dict[str, Any], emit: Emit) -> dict[str, Any]:
    def advance(what: str) -> None:
        emit("progress", what=f"{configuration['name']}: {what}")

    if configuration["kind"] == "floor":
        from .floor import measure_floor

        return measure_floor(advance=advance, **configuration["arguments"])
    from .hf import measure_hf

    return measure_hf(advance=advance, **configuration["arguments"])


def main() -> None:
    """Read the job, keep standard output for events alone, measure."""
    job, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, **more}), file=out, flush=True)

    run_job(job, emit)


if __name__ == "__main__":
    main()
