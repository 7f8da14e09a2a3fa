"""What the tests of DP attention share: flags, engines that are kept, runs that are compared."""

from __future__ import annotations

from typing import Any

from stages.part4_worker import Engine
from tests.contract import models
from tests.contract.harness import Zoo, tree_id

TREES = [None, (3, 1, 4), (3, 2, 8)]
# Trees, and whether graphs are off.
RUNS = [(None, False), ((3, 1, 4), False), ((3, 2, 8), False), ((3, 2, 8), True)]
LAYERS = models.BASE.layers
TWO_RANKS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "dist_timeout": 60}
GREEDY = {"temperature": 0, "max_new_tokens": 24}
PROMPTS = (9, 22, 7, 14, 33)


def flags(zoo: Zoo, tree=None, spec=models.BASE, **more) -> dict[str, Any]:
    """Engine keywords: small pools, short chunks, a CPU unless told otherwise."""
    given = {
        "model_path": str(zoo.target(spec)), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_total_tokens": 1024, "max_running_requests": 16, "chunked_prefill_size": 16, "random_seed": 7,
    }  # fmt: skip
    if tree is not None:
        given |= {
            "speculative_algorithm": spec.algorithm,
            "speculative_draft_model_path": str(zoo.head(spec)),
        }
        if (file := zoo.token_map(spec)) is not None:
            given["speculative_token_map"] = str(file)
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given |= dict(zip(names, tree, strict=True))
    return given | more


class Kept:
    """Engines by their flags: starting two ranks takes longer than most tests."""

    def __init__(self, zoo: Zoo, make: type = Engine, **common):
        self.zoo, self.make, self.common = zoo, make, common
        self._made: dict[Any, Engine] = {}

    def __call__(self, tree=None, eager=False, **more) -> Engine:
        if eager:
            more |= {"disable_cuda_graph": True}
        elif "device" not in self.common:  # without a GPU graphs must be asked for
            more = {"cuda_graph_max_bs": 16} | more
        key = repr((tree, more))
        if key not in self._made:
            self._made[key] = self.make(**flags(self.zoo, tree, **(self.common | more)))
        assert self._made[key].flush_cache()
        return self._made[key]

    def close(self) -> None:
        for engine in self._made.values():
            engine.shutdown()


def run_id(run) -> str:
    return tree_id(run[0]) + ("-eager" if run[1] else "")


def begin(engine: Engine, prompt: list[int], rank: int, **params):
    """A stream on one rank; its first step is the caller's next one."""
    params = GREEDY | params
    return engine.generate(input_ids=prompt, sampling_params=params, stream=True, routed_dp_rank=rank)


def entered(engine: Engine) -> int:
    """How many collectives each rank has entered."""
    return engine.scheduler._call("collectives")[0][0]


def steps(engine: Engine, since: int) -> list[list[tuple]]:
    """The collectives of each step after the first `since`, once all ranks' records of them are compared."""
    (count, log), *others = engine.scheduler._call("collectives")
    assert all(other == (count, log) for other in others)
    assert count - since <= len(log), "the record does not reach back that far"
    found: list[list[tuple]] = []
    for entry in log[len(log) - (count - since) :]:
        if entry[0] == "exchange":
            found.append([])
        else:
            found[-1].append(entry)
    return found


def gathers(step: list[tuple]) -> list[int]:
    """Rows that each rank brought to every gather of a step; each is followed by its reduce-scatter."""
    pairs = list(zip(step[::2], step[1::2], strict=True))
    for (name, (rows, width), dtype), (other, (many, width2), dtype2) in pairs:
        assert (name, other) == ("all_gather", "reduce_scatter")
        assert (many, width2, dtype2) == (2 * rows, width, dtype)
    return [entry[1][0] for entry, _ in pairs]


def told(result: dict) -> dict:
    """A result without what depends on time and on other requests."""
    meta = {k: v for k, v in result["meta_info"].items() if k not in ("id", "e2e_latency", "cached_tokens")}
    return {"output_ids": result["output_ids"], "text": result["text"]} | meta


def check_same(engine: Engine, one: Engine, prompts: list[list[int]], params, **more) -> list[dict]:
    """Both engines give the same for the same prompts, round by round; the results of `engine`."""
    wanted = one.generate(input_ids=prompts, sampling_params=params, **more)
    results = engine.generate(input_ids=prompts, sampling_params=params, **more)
    assert [told(result) for result in results] == [told(result) for result in wanted]
    check_idle(engine)
    return results


def check_plain_answers(zoo: Zoo, engine: Engine) -> None:
    """Without speculation, requests of several lengths on both ranks."""
    prompts, limits = zoo.prompts(PROMPTS, 24), (24, 6, 24, 12, 24)
    assert engine.flush_cache()
    params = [GREEDY | {"max_new_tokens": limit} for limit in limits]
    results = engine.generate(input_ids=prompts, sampling_params=params)
    wanted = [zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    assert [result["output_ids"] for result in results] == wanted
    check_idle(engine)


def check_plain_graphs_of_one_busy_rank(zoo: Zoo, engine: Engine, busy: int) -> None:
    """Both ranks gather the tokens of a prompt, then one row a step, though one of them has no request."""
    prompt = zoo.prompts((9,), 24)[0]
    assert engine.flush_cache()
    since = entered(engine)
    result = engine.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=busy)
    assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    rows = [gathers(step) for step in steps(engine, since) if step]  # the same on both ranks, or this fails
    assert set(rows[0]) == {9} and {count for step in rows[1:] for count in step} == {1}


def check_idle(engine: Engine) -> None:
    """Every slot of every rank is free or cached, and all ranks entered the same collectives."""
    for state in engine.get_server_info()["internal_states"]:
        assert state["available_size"] + state["evictable_size"] == state["max_total_num_tokens"]
        assert state["protected_size"] == state["num_running_reqs"] == state["num_waiting_reqs"] == 0
    steps(engine, entered(engine))


def alone(dp_attention) -> Any:
    """A group of one, of a stage's module, whose collectives are copies: its log says what a rank enters."""

    class Alone(dp_attention.DPGroup):
        def _run(self, name, collective, out, own, group):
            super()._run(name, lambda out, own, group: out.copy_(own), out, own, group)

    return Alone(0, 1)
