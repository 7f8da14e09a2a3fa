"""`fledge compare`: every stage on the same prompts, plain decoding, a chain and a tree, as one table.

All engines of a stage are open side by side and take turns, forth and back, so that a machine that slows down
slows all of them. Each is warmed up first, and no run finds another's prefixes cached. What a row says of
speculation is checked twice: its tokens against plain decoding's, its tokens per round against a simulation
of the loop, written apart from the engines, on the tokens that came out.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..models.cache import ModelError, find_model
from .configurations import contenders
from .divergence import Verdict, judge
from .engine_flags import command
from .measure import Cost, Run, measure, model_forwards, timed_run
from .progress import progress
from .stages_door import (
    PROMPTS,
    TREE_FLAGS,
    Stage,
    all_stages,
    encode_prompts,
    generate,
    pool_flags,
    read_prompts,
    refuse_ranks,
    resolve_stage,
    shape_name,
)

SIMULATION_TOLERANCE = 0.03  # tokens per round
NOISY = 0.25  # an engine's fastest run over its slowest, less 1, from which its speed says little


@dataclass
class Row:
    """One engine's line of the table, filled as the runs go on."""

    stage: str
    label: str
    info: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    simulated: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        return self.info["speculative_algorithm"] is None

    @property
    def runs(self) -> list[Run]:
        """The timed runs in order; they all gave the same results."""
        return [Run.of(self.results, seconds) for seconds in self.seconds]

    @property
    def tokens(self) -> int:
        """Output tokens of one run over all prompts."""
        return self.runs[0].tokens

    @property
    def speeds(self) -> list[float]:
        """Output tokens per second, end to end, of each run in order."""
        return [run.speed for run in self.runs]

    @property
    def tokens_per_round(self) -> float:
        """Tokens that all rounds made over the number of rounds; 1 for plain decoding."""
        return self.runs[0].tokens_per_round

    @property
    def verdict(self) -> Verdict:
        """The worst of the prompts' verdicts; of several the first."""
        order = ("no", "rounding", "yes")
        return min(self.verdicts, key=lambda found: order.index(found.kind), default=Verdict("yes"))

    def identical(self) -> str:
        """The last column: "yes", "rounding (token 87, gap 0.004)" or "no (token 3, gap 1.520)"."""
        worst = self.verdict
        same = sum(found.kind == worst.kind for found in self.verdicts)
        return str(worst) + (f", {same} of {len(self.verdicts)}" if worst.kind != "yes" and same > 1 else "")


def compare_stage(
    stage: Stage,
    given: dict[str, Any],
    prompts: Sequence[str],
    new_tokens: int,
    repeats: int,
    raw: bool = False,
    advance: Callable[[str], None] = lambda what: None,
    reference: Row | None = None,
) -> list[Row]:
    """All rows of one stage.

    Args:
        reference: plain decoding of another stage, for this one's to be held against.
        advance: called with what comes next, once for each of the `step_count` steps.
    """
    with ExitStack() as stack:
        pairs = []
        flags_of = contenders(stage, given)
        for i, flags in enumerate(flags_of, 1):
            advance(f"{stage.name}: loading engine {i} of {len(flags_of)}")
            engine = stack.enter_context(stage.open(**pool_flags(flags, len(prompts), new_tokens)))
            info = engine.get_server_info()
            pairs.append((Row(stage.name, shape_name(info), info), engine))
        ids = encode_prompts(pairs[0][1].tokenizer, prompts, raw)
        for row, engine in pairs:
            advance(f"{row.label}: warming up")
            generate(engine, ids, min(new_tokens, 4), ignore_eos=True)
        for repeat in range(repeats):
            for row, engine in pairs if repeat % 2 == 0 else pairs[::-1]:
                advance(f"{row.label}: run {repeat + 1} of {repeats}")
                _timed_run(row, engine, ids, new_tokens)
        for row, engine in pairs:
            # On a GPU measuring where the time goes means waiting for each forward, so that run is an extra
            # one.
            if row.info["device"] == "cuda":
                advance(f"{row.label}: where the time goes")
                _measured_run(row, engine, ids, new_tokens)
        plain_row, plain = pairs[0]
        for row, _ in pairs:
            expected = plain_row if row is not plain_row else reference or plain_row
            row.verdicts = [
                judge(plain, prompt, want["output_ids"], got["output_ids"])
                for prompt, want, got in zip(ids, expected.results, row.results, strict=True)
            ]
    if len(pairs) > 1:
        advance("simulating the rounds")
        _simulate([row for row, _ in pairs[1:]], ids)
    return [row for row, _ in pairs]


def step_count(stage: Stage, given: dict[str, Any], repeats: int, on_gpu: bool) -> int:
    """How often `compare_stage` calls `advance`."""
    rows = len(contenders(stage, given))
    return rows * (2 + repeats + on_gpu) + (rows > 1)


def _timed_run(row: Row, engine: Any, ids: list[list[int]], new_tokens: int) -> None:
    if row.info["device"] != "cuda":
        _measured_run(row, engine, ids, new_tokens)
        row.seconds.append(row.cost.total)
        return
    run, row.results = timed_run(engine, [ids], new_tokens, ignore_eos=True)
    row.seconds.append(run.seconds)


def _measured_run(row: Row, engine: Any, ids: list[list[int]], new_tokens: int) -> None:
    engine.flush_cache()
    with measure(engine, model_forwards(engine)) as row.cost:
        row.results = generate(engine, ids, new_tokens, ignore_eos=True)


def _simulate(rows: list[Row], prompts: list[list[int]]) -> None:
    """Fill in `simulated`: tokens per round of a float32 replay of the loop on each row's own outputs.

    It stays None for a head that the simulation cannot read.
    """
    import numpy as np
    import torch

    from ..models.head_eval import simulate
    from ..models.head_model import FrozenTarget, load_head

    info = rows[0].info
    try:
        target = FrozenTarget(find_model(info["model_path"]), info["device"], torch.float32)
        head = load_head(find_model(info["speculative_draft_model_path"]), info["device"])
    except ModelError:
        return
    lengths = np.array([len(prompt) for prompt in prompts])
    for row in rows:
        texts = [np.array([*p, *r["output_ids"]]) for p, r in zip(prompts, row.results, strict=True)]
        steps, topk, nodes = (row.info[name] for name in TREE_FLAGS)
        for played in simulate(head, target, texts, lengths, [(steps, topk, nodes)]):
            row.simulated = played.tokens_per_round


def failures(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a table, one sentence each: another text than plain decoding's, or another round."""
    found = [
        f"{row.stage}, {row.label}: the text is not plain decoding's; see fledge divergence {row.stage}."
        for row in rows
        if row.verdict.kind == "no"
    ]
    for row in rows:
        # In half precision the drafts round as well, so there the two numbers need not be equal.
        exact = row.info["is_on"]["dtype"] == "float32" and row.simulated is not None
        if exact and abs(row.tokens_per_round - row.simulated) > SIMULATION_TOLERANCE:
            found.append(
                f"{row.stage}, {row.label}: {row.tokens_per_round:.3f} tokens per round, where the "
                f"simulation on the same outputs has {row.simulated:.3f}."
            )
    return found


def _fledge() -> str:
    """How this terminal calls the command: it need not find what `make` has put into .venv."""
    if shutil.which("fledge"):
        return "fledge"
    script = Path(sys.executable).with_name("fledge")
    return os.path.relpath(script) if script.is_file() else f"{os.path.relpath(sys.executable)} -m tools"


def table_of(rows: Sequence[Row]) -> Table:
    """The rows of one stage or several; the first of each stage is its plain decoding."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, header_style="bold")  # fits in 80 columns
    table.add_column("engine", no_wrap=True)
    for header in (
        "tokens\n/s",
        "x\nplain",
        "tokens\n/round",
        "simu-\nlated",
        "target\nfwd/t",
        "draft\nfwd/t",
        "time %\nt/d/host",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("identical", min_width=9)
    is_one_stage = len({row.stage for row in rows}) == 1
    plain = rows[0]
    for row in rows:
        if row.is_plain:
            plain = row
            if not is_one_stage:
                table.add_row(row.stage, style="bold")
        cost, speed = row.cost, statistics.median(row.speeds)
        shares = [cost.seconds["target"], cost.seconds.get("draft", 0.0), cost.rest]
        table.add_row(
            row.label,
            f"{speed:.1f}",
            f"{speed / statistics.median(plain.speeds):.2f}",
            f"{row.tokens_per_round:.2f}",
            "-" if row.simulated is None else f"{row.simulated:.2f}",
            f"{cost.target_forwards / row.tokens:.3f}",
            f"{cost.draft_forwards / row.tokens:.3f}",
            "/".join(f"{100 * share / cost.total:.0f}" for share in shares),
            row.identical(),
        )
    return table


def notes(rows: Sequence[Row], new_tokens: int, repeats: int) -> list[str]:
    """What a reader must know to read the table."""
    info, prompts = rows[0].info, len(rows[0].results)
    spreads = [max(row.speeds) / min(row.speeds) - 1 for row in rows]
    found = []
    if info["device"] != "cuda":
        found.append(
            "Speculation is slower here, as expected: on a CPU every verified row costs like a token, so a "
            "forward over a tree of 8 costs several times one over a single token. What carries over is "
            "tokens/round."
        )
    elif eager := [row.stage for row in rows if not row.info["is_on"]["cuda_graph"]]:
        found.append(
            f"No CUDA graphs in {', '.join(dict.fromkeys(eager))}: a step's time is that of launching its "
            "kernels one by one, and a round of EAGLE launches several times as many as a step of plain "
            "decoding."
        )
    if noisy := [f"{row.stage}, {row.label}" for row, by in zip(rows, spreads, strict=True) if by > NOISY]:
        found.append(
            f"Noisy: the runs of {'; '.join(noisy)} differ by more than {NOISY:.0%}. Something else was at "
            "work on this machine: do not compare their tokens/s."
        )
    return found + [
        f"{prompts} prompts in one batch, {new_tokens} new tokens each, greedy, end of turn ignored; "
        f"{info['device']}, {info['is_on']['dtype']}, {info['attention_backend']}.",
        f"tokens/s: end to end, median of {repeats} runs per engine in alternated order, warm-up excluded; "
        f"the fastest and the slowest run of an engine differ by up to {max(spreads):.0%}.",
        "tokens/round: what one verification gives; simulated: the same from a float32 replay of the loop on "
        "these outputs, written apart from the engines.",
        "identical: to plain decoding of the same stage; plain decoding itself to that of the first stage.",
        "fwd/t: forwards of each model per generated token; one forward serves the whole batch.",
        "time: in the target's forwards, in the draft's, and in all that the host does around them "
        "(scheduling, trees, acceptance, text).",
    ]


@command
def compare(
    stages: Annotated[
        list[str] | None, typer.Argument(metavar="[STAGE]...", help="Names or directories. Default: all.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One a line, or a JSON list. Default: eight questions."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only so many of them.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each engine; the median counts.")] = 2,
    engine_flags: dict[str, Any] | None = None,
) -> None:
    """Same prompts: plain, chain and tree, as a table.

    Exit status 1 if a text differs from plain decoding's by more than rounding, or if the tokens per round
    (in float32) are not those of the simulation.
    """
    import torch

    given = engine_flags or {}
    refuse_ranks(given, "compare")
    texts = read_prompts(prompts or PROMPTS)[:num_prompts]
    chosen = [resolve_stage(name) for name in stages] if stages else all_stages()
    on_gpu = torch.cuda.is_available() and given.get("device") != "cpu"
    rows: list[Row] = []
    with progress(sum(step_count(stage, given, repeats, on_gpu) for stage in chosen)) as advance:
        for i, stage in enumerate(chosen, 1):
            first = rows[0] if rows else None
            which = f"stage {i} of {len(chosen)}, " if len(chosen) > 1 else ""

            def told(what: str, which: str = which) -> None:
                advance(which + what)

            rows += compare_stage(stage, given, texts, max_new_tokens, repeats, raw, told, first)
    console = Console(highlight=False)
    console.print(table_of(rows))
    for line in notes(rows, max_new_tokens, repeats):
        console.print(line, style="dim")
    for sentence in (wrong := failures(rows)):
        typer.echo(sentence, err=True)
    console.print("\nWhere to look next")
    name, fledge = chosen[-1].name, _fledge()
    for what, where in (
        ("the course: pages, player, exercises", "make site"),
        ("an answer, round by round", f'{fledge} run {name} --prompt "Explain what a hash table is."'),
        ("how to read the engine", f"{os.path.relpath(chosen[-1].path)}/README.md"),
        ("where a text leaves plain decoding's", f"{fledge} divergence {name}"),
    ):
        console.print(f"  {what:38}{where}", soft_wrap=True, markup=False)
    if wrong:
        raise typer.Exit(1)
