"""`fledge upstream launch`: a stage's flags as a command line and as Python for the real engine.

Which flags the real engine knows is recorded in the ledger, from the released wheel.
"""

from __future__ import annotations

import difflib
import shlex
from typing import Annotated, Any

import typer

from ..bench.engine_flags import command
from ..bench.stages_door import merge_flags, resolve_stage
from ..models.cache import FETCHED, ModelError, model_path
from .history import UpstreamError
from .ledger import LedgerHistory
from .verbs import aside, say, verb


@command
@verb
def launch(
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="A stage's name, or the path of its directory.")
    ],
    *,
    engine_flags: dict[str, Any],
) -> None:
    """Print how to start SGLang itself with what `fledge run STAGE` would use."""
    wheel = LedgerHistory.load().wheel
    if wheel is None:
        raise UpstreamError(
            "The ledger has no record of the wheel, so the real engine's flags are not known."
        )
    flags = merge_flags(resolve_stage(stage), engine_flags)
    unknown = [name for name in flags if name not in wheel.flags]
    flags = {name: value for name, value in flags.items() if name in wheel.flags}
    say(server_line(flags) + "\n")
    say(engine_call(flags))
    for name in unknown:
        near = ", ".join(difflib.get_close_matches(name, wheel.flags))
        hint = f" (near it: {near})" if near else ""
        aside(f"sglang {wheel.version} knows no flag {name}, so it is left out{hint}.")


def server_line(flags: dict[str, Any]) -> str:
    """The command that starts the real server; a model of ours is looked up by `fledge models path`."""
    words = ["python -m sglang.launch_server"]
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        elif value in FETCHED:
            words.append(f'{option} "$(fledge models path {value})"')
        elif isinstance(value, (list, tuple)):
            words.append(f"{option} {' '.join(map(str, value))}")
        else:
            words.append(f"{option} {shlex.quote(str(value))}")
    return " \\\n    ".join(words)


def engine_call(flags: dict[str, Any]) -> str:
    """The same as a call of `sglang.Engine`, with the folders of our models where they are in the cache."""
    lines = [f"    {name}={_folder(value)!r}," for name, value in flags.items()]
    return "\n".join(["import sglang", "", "engine = sglang.Engine(", *lines, ")"])


def _folder(value: Any) -> Any:
    try:
        return str(model_path(value)) if value in FETCHED else value
    except ModelError:
        return value
