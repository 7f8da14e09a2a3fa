"""`fledge bench`: how fast a stage is, measured so that the numbers can be kept and argued about.

bench_plans.py decides what runs when, bench_process.py measures, bench_runs.py collects, bench_summary.py
reckons, bench_report.py shows; bench_pairs.py lets two engines take turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .bench_pairs import Side, measure_pairs, pairs_path, refuse_existing
from .bench_plans import Asked, engine_plans, floor_plans, hf_plans, tune_plans
from .bench_report import FOLDER, notes, render, table_of
from .bench_results import Results, load, result_path
from .bench_runs import Plan, run_plans
from .bench_summary import best_per_batch
from .configurations import BATCHES
from .engine_flags import command
from .pairs_summary import lines_of, load_pairs
from .progress import progress
from .prompt_sets import DEFAULT_SETS, PromptSet, load_sets
from .stages_door import BadInput, Stage, all_stages, refuse_ranks, refuse_shape, resolve_stage


@command
def bench(
    stage: Annotated[
        str | None, typer.Argument(help="A name under stages/, or a directory. Default: the last stage.")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(help="Several stages in turn, each into its own file: all, or names with commas."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, chain, tree, tuned, steps/topk/tokens, or a method: ngram, standalone, eagle3, "
            "adaptive, multi-layer; repeat it. Default: the first four."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeat it. Default: 1 8 32 64 128.")
    ] = None,
    prompt_set: Annotated[
        list[str] | None,
        typer.Option("--set", help="questions, held-out, code-edits; repeat it. Default: the first two."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the best shape of a listed grid for each batch size.")
    ] = False,
    floor: Annotated[bool, typer.Option("--floor", help="Measure the machine's own limits.")] = False,
    hf: Annotated[
        bool, typer.Option("--hf", help="Measure Hugging Face generate, greedy and with prompt look-up.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE [--config NAME] [FLAGS]",
            help="Measure alternated pairs with this engine instead; in quotes, what it has of its own.",
        ),
    ] = None,
    pairs: Annotated[int | None, typer.Option(min=2, help="How many, with --against. Default: 10.")] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="With --against: not speed, but the device's idle time in a round.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each cell in each process.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0, help="A cell begins no further run after so many seconds of runs.")
    ] = 10.0,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many minutes; the same command goes on.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=4, help="Length of each answer, if not the set's own.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The result file. Default: in docs/data/bench.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what the result file holds.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; print what the files hold.")] = False,
    render_tables: Annotated[
        bool, typer.Option("--render", help="Measure nothing; write the tables of the README anew.")
    ] = False,
    engine_flags: dict[str, Any] | None = None,
) -> None:
    """Measure a stage: plain decoding and EAGLE, batch by batch, with everything that a number needs.

    With --against two engines take turns, as one --config or their flags have them (default: the eight
    questions, batch 32).
    With --tune, --floor or --hf only that is measured, and configurations only where --config names them.
    Numbers are written after each cell, and the same command goes on where one was interrupted. Exit status
    1 if a configuration failed or the time ran out.
    """
    if render_tables:
        typer.echo("\n".join(f"{name}: written anew" for name in render()) or "all tables are up to date")
        return
    given = engine_flags or {}
    found = _stages(stage, stages)
    if against is not None:
        if stages or len(config or ()) > 1 or tune or floor or hf or show:
            raise BadInput("--against compares two engines, each with one --config, and does nothing else.")
        mine = Side(found[0], given, config[0] if config else None)
        both = (mine, mine.other(against))
        sets = _sets(prompt_set or ["questions"])
        path = out or pairs_path(FOLDER, both, idle)
        refuse_existing(path, fresh)
        chosen = tuple(sorted(set(batch or (32,))))
        with progress(2 + len(sets) * len(chosen)) as advance:
            measure_pairs(both, sets, chosen, pairs or 10, max_new_tokens, raw, path, advance, idle)
        # As the file has it: its numbers are rounded.
        typer.echo("\n".join([*lines_of(load_pairs(path)), f"raw numbers: {path}"]))
        return
    if idle or pairs:
        raise BadInput("--idle and --pairs compare two engines: name the other one with --against.")
    if show:
        _print(_kept(found, given.get("attention_backend"), out))
        return
    is_special = tune or floor or hf
    if stages and (is_special or out):
        raise BadInput("--tune, --floor, --hf and --out are for one stage: name it without --stages.")
    refuse_shape(given)
    refuse_ranks(given, "bench")
    batches, sets = tuple(sorted(set(batch or BATCHES))), _sets(prompt_set)
    targets: list[tuple[Asked, Path]] = []
    for one in found:
        asked = Asked(one, given, batches, sets, repeat, seconds, max_new_tokens, raw)
        path = out or result_path(FOLDER, one.name, asked.resolved.attention_backend)
        targets.append((asked, path.resolve()))
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    wanted = [(asked, Results(path, asked.header(), fresh)) for asked, path in targets]
    wrong = measure(wanted, config or (() if is_special else None), tune, floor, hf, deadline)
    for sentence in wrong:
        typer.echo(sentence, err=True)
    _print([path for _, path in targets if path.exists()])
    if wrong or not all(path.exists() for _, path in targets):
        raise typer.Exit(1)


def measure(
    targets: Sequence[tuple[Asked, Results]],
    config: Sequence[str] | None = None,
    tune: bool = False,
    floor: bool = False,
    hf: bool = False,
    deadline: float = float("inf"),
) -> list[str]:
    """Run what is missing of all that is asked for; returns what went wrong, a sentence each.

    With several stages the processes of the first turn run stage by stage, those of the second back again.
    """
    wrong = _run(
        [
            (plan, results)
            for asked, results in targets
            for plans in (floor_plans if floor else None, tune_plans if tune else None)
            for plan in (plans(asked, results) if plans else ())
        ],
        deadline,
    )
    for _, results in targets if tune else ():
        results.data["tuned"] = {str(b): name for b, name in best_per_batch(results.data, "tune").items()}
        results.save()
    # What "tuned" means is known only now.
    rest = [
        (plan, results)
        for asked, results in targets
        for plan in engine_plans(asked, results, asked.configurations(config))
    ]
    there, back = ([pair for pair in rest if pair[0].turn == turn] for turn in (1, 2))
    back.sort(key=lambda pair: -[results for _, results in targets].index(pair[1]))
    last = [(plan, results) for asked, results in targets if hf for plan in hf_plans(asked, results)]
    return wrong + _run([*there, *back, *last], deadline)


def _run(plans: list[tuple[Plan, Results]], deadline: float) -> list[str]:
    if not plans:
        return []
    with progress(sum(_steps(plan) for plan, _ in plans)) as advance:
        return run_plans(plans, advance, deadline)


def _steps(plan: Plan) -> int:
    """How often the process says what comes next; about, for those that are no engines."""
    sets = len(plan.job.get("sets", "x"))
    return sum(1 + sets * len(entry.get("batches", "four")) for entry in plan.job["configurations"])


def _kept(stages: Sequence[Stage], backend: str | None, out: Path | None) -> list[Path]:
    """`out`, or the stages' files of one backend or of all, on any machine. Raises BadInput for none."""
    name = f"-{backend or '*'}.json"
    paths = [out] if out else [path for one in stages for path in sorted(FOLDER.glob(one.name + name))]
    if not paths:
        more = f" --attention-backend {backend}" if backend else ""
        words = f"`fledge bench {stages[0].name}{more}`"
        raise BadInput(f"Nothing is measured yet: {words} on a machine with a GPU writes what can be shown.")
    return paths


def _print(paths: list[Path]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)
    for path in paths:
        if "-over-" in path.name:
            console.print("\n".join([*lines_of(load_pairs(path)), f"raw numbers: {path}"]), soft_wrap=True)
            continue
        data = load(path)
        console.print(table_of(data))
        for line in notes(data):
            console.print(line, soft_wrap=True)
        console.print(f"raw numbers of {data['stage']}: {path}", soft_wrap=True)


def _stages(stage: str | None, stages: str | None) -> list[Stage]:
    if stages is None:
        return [resolve_stage(stage) if stage else all_stages()[-1]]
    if stage is not None:
        raise BadInput(f"{stage!r} and --stages {stages}: give one of them.")
    return all_stages() if stages == "all" else [resolve_stage(name) for name in stages.split(",")]


def _sets(names: list[str] | None) -> tuple[PromptSet, ...]:
    known = load_sets()
    if unknown := [name for name in names or () if name not in known]:
        raise BadInput(f"There is no prompt set {unknown[0]!r}: give {', '.join(known)}.")
    return tuple(known[name] for name in known if name in (names or DEFAULT_SETS))
