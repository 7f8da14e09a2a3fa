"""What the suite's tests share: the stage under test, a zoo of tiny models, engines that are kept, runs that
are checked.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import tomllib
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import models
from .models import TargetSpec
from .probe import Probe
from .reference import Eagle3RefHead, MultiLayerRefHead, RefHead, RefTarget, StandaloneRefDraft, greedy

REPO = Path(__file__).resolve().parents[2]
GAP = 1e-3  # prompts whose greedy top two ever come closer are dropped
KEPT_ENGINES = 24


class Stage:
    """One directory under test: its package, its features. A stage whose scheduler overlaps is tested twice,
    the second time without.
    """

    def __init__(self, name_or_path: str, overlap: bool = True):
        path = Path(name_or_path)
        if not path.is_dir():
            path = REPO / "stages" / name_or_path
        self.path = path.resolve()
        self.name = self.path.name
        table = tomllib.loads((self.path / "stage.toml").read_text())
        self.present = frozenset(table["features"]["present"])
        self.missing = {
            name: entry["arrives"] for name, entry in table["features"].get("missing", {}).items()
        }
        self.overlaps = overlap and "overlap" in self.present

    def __repr__(self) -> str:
        return self.name

    def without_overlap(self) -> list[Stage]:
        """The same stage, its scheduler waiting for each step, where it would not do so anyway."""
        return [Stage(str(self.path), overlap=False)] if self.overlaps else []

    @property
    def id(self) -> str:
        return f"{self.name}-normal" if self.has("overlap") and not self.overlaps else self.name

    @cached_property
    def package(self):
        """The stage's package; one outside `stages/` is loaded under a name of its own."""
        if self.path.parent == REPO / "stages":
            return importlib.import_module(f"stages.{self.name}")
        name = f"stage_under_test_{self.name}"
        spec = importlib.util.spec_from_file_location(
            name, self.path / "__init__.py", submodule_search_locations=[str(self.path)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    @property
    def Engine(self):
        return self.package.Engine

    def module(self, name: str):
        """A module of the stage's own package, such as "model_executor.device_io"."""
        return importlib.import_module(f"{self.package.__name__}.{name}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """A tree to draft, for tests to which one is like another; a chain where there are no trees."""
        return (3, 2, 8) if self.has("tree") else (3, 1, 4)

    def has(self, *features: str) -> bool:
        return all(feature in self.present for feature in features)


class Zoo:
    """Model folders and their references, each made once per session."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: dict[Any, Any] = {}

    def _once(self, key, make):
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def target(self, spec: TargetSpec = models.BASE) -> Path:
        return self._once(
            ("target", spec), lambda: models.write_target(self.folder / f"{spec.name}-target", spec)
        )

    def head(self, spec: TargetSpec = models.BASE, skill: float = 1.0, bias: bool = True) -> Path:
        def make():
            if spec.algorithm == "EAGLE3":
                tensors = models.eagle3_head_tensors(spec, self.target(spec), skill=skill)
            elif spec.algorithm == "STANDALONE":
                tensors = models.standalone_tensors(spec, self.target(spec))
            elif spec.modules > 1:
                tensors = models.multi_layer_tensors(spec, self.target(spec))
            else:
                tensors = models.head_tensors(spec, self.target(spec), skill=skill, bias=bias)
            return models.write_head(self.folder / f"{spec.name}-head-{skill}-{bias}", spec, tensors)

        return self._once(("head", spec, skill, bias), make)

    def token_map(self, spec: TargetSpec) -> Path | None:
        """The file that an EAGLE draft of `spec` is run with, if it proposes hot tokens only."""
        if not spec.hot or spec.algorithm != "EAGLE":
            return None
        return self._once(
            ("token_map", spec), lambda: models.write_token_map(self.folder / f"{spec.name}-map.pt", spec)
        )

    def ref(self, spec: TargetSpec = models.BASE) -> RefTarget:
        return self._once(("ref", spec), lambda: RefTarget(self.target(spec)))

    def ref_head(self, spec: TargetSpec = models.BASE, **head) -> RefHead:
        def make():
            folder, target = self.head(spec, **head), self.ref(spec)
            if spec.algorithm == "EAGLE3":
                return Eagle3RefHead.read(folder, target)
            if spec.algorithm == "STANDALONE":
                return StandaloneRefDraft(RefTarget(folder), target)
            if spec.modules > 1:
                return MultiLayerRefHead.read(folder, target, spec.modules)
            return RefHead.read(folder, target, hot=spec.hot_tokens() if spec.hot else None)

        return self._once(("ref_head", spec, *head.items()), make)

    def r0(self, prompt: list[int], spec: TargetSpec = models.BASE, **params) -> list[int]:
        """Greedy output without a cache under the stop rules of `params` (max_new_tokens 16 unless given)."""
        return greedy(self.ref(spec), prompt, {"max_new_tokens": 16, **params}).tokens

    def prompts(
        self, lengths, new_tokens: int = 24, spec: TargetSpec = models.BASE, seed: int = 0
    ) -> list[list[int]]:
        """Random prompts of the given lengths whose greedy continuation never comes near a tie."""

        def make():
            generator = torch.Generator().manual_seed(4242 + seed)
            found = []
            for length in lengths:
                while True:
                    prompt = torch.randint(3, spec.vocab, (length,), generator=generator).tolist()
                    run = greedy(self.ref(spec), prompt, {"max_new_tokens": new_tokens, "ignore_eos": True})
                    if run.gap > GAP:
                        found.append(prompt)
                        break
            return found

        return self._once(("prompts", tuple(lengths), new_tokens, spec, seed), make)

    def close(self) -> None:
        self._made.clear()


class Engines:
    """Engines by their flags, kept between tests, since what a test needs most often is one
    that another had.
    """

    def __init__(self, stage: Stage, zoo: Zoo):
        self.stage, self.zoo = stage, zoo
        self._open: OrderedDict[Any, Any] = OrderedDict()

    def flags(self, spec: TargetSpec = models.BASE, tree=None, skill: float = 1.0, **flags) -> dict[str, Any]:
        """Engine keywords: small pools, a CPU, float32; `tree` is (steps, topk, draft_tokens), None for
        plain.
        """
        merged: dict[str, Any] = {
            "model_path": str(self.zoo.target(spec)),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_total_tokens": 2048,
            "max_running_requests": 16,
            "chunked_prefill_size": -1,
            "random_seed": 7,
            "log_level": "error",
        }
        if tree is not None:
            steps, topk, draft_tokens = tree
            merged.update(
                speculative_algorithm=spec.algorithm,
                speculative_token_map=None if (file := self.zoo.token_map(spec)) is None else str(file),
                speculative_draft_model_path=str(self.zoo.head(spec, skill=skill)),
                speculative_num_steps=steps,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=draft_tokens,
            )
        if self.stage.has("overlap") and not self.stage.overlaps:
            merged["disable_overlap_schedule"] = True
        merged.update(flags)
        if (
            self.stage.has("cuda_graph")
            and not merged.get("disable_cuda_graph")
            and not merged.get("cuda_graph_bs")
        ):
            # Without a GPU graphs must be asked for, and every case is to go through their runner.
            merged.setdefault("cuda_graph_max_bs", merged["max_running_requests"])
        return {name: value for name, value in merged.items() if value is not None}

    def fresh(self, *args, **kwargs):
        """A new engine that the caller shuts down (use it as a context manager)."""
        return self.stage.Engine(**self.flags(*args, **kwargs))

    def get(self, *args, **kwargs):
        """An idle engine with an empty cache; it belongs to the session."""
        flags = self.flags(*args, **kwargs)
        key = tuple(sorted((name, repr(value)) for name, value in flags.items()))
        if key not in self._open:
            if len(self._open) >= KEPT_ENGINES:
                self._open.popitem(last=False)[1].shutdown()
            self._open[key] = self.stage.Engine(**flags)
        self._open.move_to_end(key)
        engine = self._open[key]
        engine.flush_cache()
        Probe(engine).check_idle()
        return engine

    def drop(self, engine) -> None:
        """Forget an engine that a failed test may have left in a bad state."""
        for key, kept in list(self._open.items()):
            if kept is engine:
                del self._open[key]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].shutdown()


@dataclasses.dataclass
class Run:
    """Results in order of the prompts, and per request the tokens each step committed (prefill first)."""

    results: list[dict]
    commits: list[list[int]]

    @property
    def tokens(self) -> list[list[int]]:
        return [result["output_ids"] for result in self.results]

    @property
    def rounds(self) -> list[list[int]]:
        """Tokens per decode round of each request."""
        return [commits[1:] for commits in self.commits]


def run(
    engine,
    prompts: list[list[int]],
    params=None,
    check: bool = True,
    ref=None,
    ref_head=None,
    after=None,
    before=None,
    **more,
) -> Run:
    """Generate for all prompts at once, greedy unless `params` say otherwise, with the invariants checked
    each step.

    `ref`, `ref_head`: references for the KV checks. `after(probe)`, `before(probe)`: more to do around each
    step.
    """
    probe = Probe(engine)
    base = {"temperature": 0, "max_new_tokens": 16}
    each = (
        [{**base, **p} for p in params]
        if isinstance(params, list)
        else [{**base, **(params or {})}] * len(prompts)
    )
    rids = [f"r{i}" for i in range(len(prompts))]
    seen: dict[str, list[list[int]]] = {rid: [] for rid in rids}
    live: dict[str, Any] = {}

    def look() -> None:
        live.update({req.rid: req for req in probe.holders()})
        for rid, req in live.items():
            if rid in seen:
                seen[rid].append(len(req.output_ids))
        if check:
            probe.check_all(ref, ref_head)
        if after is not None:
            after(probe)

    def start() -> None:
        live.update({req.rid: req for req in probe.scheduler.waiting_queue})
        if before is not None:
            before(probe)

    with probe.watch(after=look, before=start):
        results = engine.generate(input_ids=prompts, sampling_params=each, rid=rids, **more)
    probe.settle()
    probe.check_idle()
    commits = []
    for rid, result in zip(rids, results, strict=True):
        lengths = [0, *seen[rid], len(result["output_ids"])]
        commits.append([b - a for a, b in zip(lengths, lengths[1:], strict=False) if b > a])
    return Run(results, commits)


def accepted(result: dict) -> int:
    """Draft tokens that became output, from the histogram in meta_info."""
    return sum(i * count for i, count in enumerate(result["meta_info"]["spec_correct_drafts_histogram"]))


def tree_id(tree) -> str:
    return "plain" if tree is None else "{}-{}-{}".format(*tree)
