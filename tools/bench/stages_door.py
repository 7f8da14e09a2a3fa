"""Which stage a command means and the way into it: package, features, default flags, prompts, engines.

STAGE is a name under stages/ or a path to a stage's directory. A stage is whole, so a copy anywhere works: it
is imported under a name of its own and takes nothing from the stage it was copied from.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..sentences import did_you_mean

STAGES = Path(__file__).resolve().parents[2] / "stages"
PROMPTS = Path(__file__).with_name("prompts.json")
TARGET, HEAD = "smollm2-135m-instruct", "smollm2-135m-eagle"  # what `fledge models fetch` brings
# Drafts of other methods: where `fledge models distill-draft` puts one, and the name of an EAGLE-3 head.
DRAFTS = {"standalone": f"{TARGET}-draft", "eagle3": "smollm2-135m-eagle3"}
TREE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# What drafts chains alone, so that a tree as the default would be refused.
CHAIN_FLAGS = ("enable_multi_layer_eagle", "speculative_adaptive", "speculative_use_rejection_sampling")


class BadInput(Exception):
    """Something the caller can mend; the message is one sentence that says how."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an engine's ValueError, which is a sentence for the caller, into BadInput."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from error


@dataclass(frozen=True)
class Stage:
    """One stage's directory and what its stage.toml says."""

    path: Path
    table: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name

    def has(self, feature: str) -> bool:
        return feature in self.table["features"]["present"]

    def default_flags(self) -> dict[str, Any]:
        """Engine flags of `fledge run`: the table [run] of stage.toml, on the embedded model and its head."""
        flags = {"model_path": TARGET} | self.table.get("run", {})
        if flags.get("speculative_algorithm") is None:
            return flags
        return {"speculative_draft_model_path": HEAD} | flags

    def package(self) -> ModuleType:
        """The stage's package; a directory outside stages/ gets a name that nothing else has."""
        if self.path.parent == STAGES:
            return importlib.import_module(f"stages.{self.name}")
        name = f"stage_{hashlib.sha256(str(self.path).encode()).hexdigest()[:12]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(
                name, self.path / "__init__.py", submodule_search_locations=[str(self.path)]
            )
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]

    def open(self, **flags: Any) -> Any:
        """A new `Engine` of this stage, to be used as a context manager. Raises BadInput for its refusals."""
        engine_class = self.package().Engine
        with refusals():
            return engine_class(**flags)


def all_stages(folder: Path = STAGES) -> list[Stage]:
    """Every stage under `folder`, in the order of the story, which is that of the names."""
    return [_read(path.parent) for path in sorted(folder.glob("*/stage.toml"))]


def resolve_stage(text: str) -> Stage:
    """The stage called `text`, or the one in the directory `text`.

    Raises BadInput where there is none, naming those there are.
    """
    for path in (STAGES / text, Path(text).expanduser()):
        if (path / "stage.toml").is_file():
            return _read(path.resolve())
    names = [stage.name for stage in all_stages()]
    raise BadInput(
        f"There is no stage {text!r}: give a name ({', '.join(names)}) or the path of a directory with a "
        f"stage.toml.{did_you_mean(text, names)}"
    )


def _read(path: Path) -> Stage:
    try:
        table = tomllib.loads((path / "stage.toml").read_text(encoding="utf-8"))
        table["features"]["present"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise BadInput(
            f"{path / 'stage.toml'} cannot be used ({type(error).__name__}: {error}): "
            "it needs the list `present` under [features]."
        ) from None
    return Stage(path, table)


def merge_flags(stage: Stage, given: dict[str, Any]) -> dict[str, Any]:
    """The stage's default flags with the given ones over them, as keywords for `Engine`.

    Four defaults give way as a whole: the tree's shape as soon as one of its numbers is given, or a flag
    that drafts chains (the engine derives the rest), all of speculation under `speculative_algorithm` "none"
    and under "NGRAM", which has no draft model, and all of speculation where another target is given without
    a head for it. STANDALONE and EAGLE3 have other drafts.
    """
    defaults, given = stage.default_flags(), dict(given)
    algorithm = given.get("speculative_algorithm", "").lower()
    is_off, asks_nobody = algorithm == "none", algorithm == "ngram"
    if is_off:
        del given["speculative_algorithm"]
    if algorithm in DRAFTS:
        defaults["speculative_draft_model_path"] = DRAFTS[algorithm]
    has_no_head = "model_path" in given and "speculative_draft_model_path" not in given
    if is_off or asks_nobody or has_no_head:
        defaults = plain_flags(defaults)
    if shapes_itself(given):
        defaults = {name: value for name, value in defaults.items() if name not in TREE_FLAGS}
    return defaults | given


def shapes_itself(given: dict[str, Any]) -> bool:
    """Whether flags say something of the shape of what is drafted."""
    return any(name in given for name in TREE_FLAGS) or any(given.get(name) for name in CHAIN_FLAGS)


def plain_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The same flags without speculation."""
    drop = "enable_multi_layer_eagle"
    return {n: value for n, value in flags.items() if not n.startswith("speculative_") and n != drop}


def shape_name(info: dict[str, Any]) -> str:
    """What an engine drafts, from `get_server_info()`: "chain 3/1/4", "tree 3/4/8", "n-grams 12", "plain"."""
    if info["speculative_algorithm"] is None:
        return "plain"
    steps, topk, nodes = (info[name] for name in TREE_FLAGS)
    if info["speculative_algorithm"] == "NGRAM":
        return f"n-grams {nodes}"
    return f"{'chain' if topk == 1 else 'tree'} {steps}/{topk}/{nodes}"


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a JSON list, a JSON object with the list under "questions" or "prompts", or one a
    line.

    Raises BadInput for a file that cannot be read or holds none.
    """
    try:
        content = path.read_text(encoding="utf-8")
        prompts: Any = content.splitlines()
        if path.suffix == ".json":
            data = json.loads(content)
            prompts = data.get("questions", data.get("prompts")) if isinstance(data, dict) else data
    except (OSError, ValueError) as error:
        raise BadInput(f"No prompts could be read from {path} ({error}).") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadInput(f"{path} holds no list of texts, neither as a whole nor under 'questions'.")
    if not (prompts := [prompt for prompt in prompts if prompt.strip()]):
        raise BadInput(f"{path} holds no prompt.")
    return prompts


def refuse_ranks(flags: dict[str, Any], command: str) -> None:
    """Raise BadInput for an engine whose steps run in other processes, where nobody can look into them."""
    if flags.get("enable_dp_attention"):
        raise BadInput(
            f"fledge {command} looks into the engine's own process: no --enable-dp-attention here."
        )


def refuse_shape(flags: dict[str, Any]) -> None:
    """Raise BadInput for a number of a tree's shape beside a configuration, which has its own."""
    for name in TREE_FLAGS:
        if name in flags:
            raise BadInput(f"--{name.replace('_', '-')}: give shapes as --config steps/topk/tokens.")


def encode_prompts(tokenizer: Any, prompts: Sequence[str], raw: bool) -> list[list[int]]:
    """Token ids of each prompt: as they stand if `raw`, else as a user's turn in the chat template.

    The template adds its default system prompt. Raises BadInput where there is no tokenizer (None) or no
    template.
    """
    if tokenizer is None:
        raise BadInput("A prompt is text, and --skip-tokenizer-init loads no tokenizer: leave it out.")
    for prompt in prompts:
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that were not UTF-8
            raise BadInput(f"The prompt {prompt!r} is not valid text: give it in UTF-8.")
    if raw:
        return [tokenizer.encode(prompt) for prompt in prompts]
    if tokenizer.chat_template is None:
        raise BadInput("The model's tokenizer has no chat template: add --raw to send prompts as they are.")
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def pool_flags(flags: dict[str, Any], prompts: int, new_tokens: int) -> dict[str, Any]:
    """The flags with a KV pool that fits `prompts` answers, so that several engines find room side by side.

    A pool the caller asked for is kept. A prompt of more than a thousand tokens on average needs that.
    """
    slots = prompts * (1024 + new_tokens + 8 * flags.get("page_size", 1))
    return {"max_total_tokens": max(4096, slots)} | flags


def generate(
    engine: Any, prompts: list[list[int]], new_tokens: int, rid: list[str] | None = None, **params: Any
) -> list[dict[str, Any]]:
    """Greedy results for all prompts at once. Raises BadInput for what the engine refuses or aborts."""
    wanted = {"temperature": 0, "max_new_tokens": new_tokens, **params}
    with refusals():
        results = engine.generate(input_ids=prompts, sampling_params=wanted, rid=rid)
    for result in results:
        refuse_abort(result)
    return results


def refuse_abort(result: dict[str, Any]) -> None:
    """Raise BadInput, with the engine's reason, for a request that it ended."""
    reason = result["meta_info"]["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        raise BadInput(f"The engine ended a request: {reason.get('message', 'no reason given')}")
