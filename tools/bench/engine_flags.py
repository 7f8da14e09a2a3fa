"""Every keyword of `Engine` as an option of a command, and errors as one sentence.

The options are read from server_args.py, which is the same file in all stages and imports nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer

from ..models.cache import ModelError
from ..sentences import sentences
from .stages_door import STAGES, BadInput

PANEL = "Engine flags: SGLang's names; a stage's defaults are in its stage.toml"
_NOTES = {
    "model_path": "The target: a folder, a name in the cache, or a hub id.",
    "speculative_draft_model_path": "The draft head or model: a folder, a name in the cache, or a hub id.",
    "speculative_algorithm": "EAGLE, EAGLE3 …, or none for plain decoding.",
    "speculative_num_steps": "Levels of the draft tree.",
    "speculative_eagle_topk": "Branches of the draft tree; 1 makes a chain.",
    "speculative_token_map": "Tokens that an EAGLE draft proposes; `fledge models token-map` makes it.",
    "speculative_num_draft_tokens": "Nodes to verify, the last token included.",
    "cuda_graph_bs": "Batch sizes, separated by commas.",
}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function` an option for every engine flag; what was given arrives as the dict `engine_flags`.

    BadInput and ModelError become their sentence on standard error and exit status 2.
    """
    fields = _flag_fields()
    own = [
        p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "engine_flags"
    ]
    options = [_option(name, kind) for name, kind in fields.items()]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in fields}
        with sentences(2, BadInput, ModelError):
            flags = {name: _value(name, value) for name, value in given.items() if value is not None}
            function(**values, engine_flags=flags)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own + options]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # its signature is not the one to look at
    return run


def parse_engine(text: str) -> tuple[str, str | None, dict[str, Any]]:
    """Stage, configuration and engine flags in words as a command has them: "spec_v2 --config plain".

    Raises BadInput for what is no stage with flags.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, prog=text)
    parser.add_argument("stage")
    parser.add_argument("--config")
    for name, kind in _flag_fields().items():
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument("--" + name.replace("_", "-"), dest=name, default=None, **how)
    try:
        values = vars(parser.parse_args(shlex.split(text)))
    except ValueError as error:  # a quotation that does not end
        parser.error(str(error))
    stage, config = values.pop("stage"), values.pop("config")
    return stage, config, {name: _value(name, value) for name, value in values.items() if value is not None}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{self.prog!r} is no stage with engine flags: {message}.")


@functools.cache
def _flag_fields() -> dict[str, type]:
    """Flag → the type of its value, from `ServerArgs`; a tuple is given as text."""
    path = next(iter(sorted(STAGES.glob("*/server_args.py"))), None)
    if path is None:
        raise BadInput(f"There is no stage in {STAGES}.")
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "tuple[int, ...]": str}
    fields = dataclasses.fields(_module_alone(path).ServerArgs)
    return {f.name: kinds[f.type.removesuffix(" | None")] for f in fields if f.name != "features"}


def _module_alone(path: Path) -> ModuleType:
    """The module in `path` without what the package around it starts with, which would bring torch."""
    package = ModuleType("_fledge_stage_alone")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    try:
        return importlib.import_module(f"{package.__name__}.{path.stem}")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
            del sys.modules[name]


def _option(name: str, kind: type) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), help=_NOTES.get(name, ""), rich_help_panel=PANEL)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _value(name: str, value: Any) -> Any:
    if name != "cuda_graph_bs":
        return value
    try:
        return [int(size) for size in value.split(",")]
    except ValueError:
        raise BadInput(f"--cuda-graph-bs {value!r} is not allowed; give whole numbers like 1,2,4.") from None
