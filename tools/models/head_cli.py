"""`fledge models train-head · eval-head · convert-head · token-map`; `register` adds them to `models`."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from ..sentences import sentences
from .cache import ModelError, find_model, write_json

Target = Annotated[str, typer.Argument(help="A model in the cache, or a folder.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
# What a command has that writes text with an engine and then trains on it.
Conversations = Annotated[int, typer.Option(min=1, help="How many to write.")]
Writer = Annotated[str, typer.Option(help="Whose engine writes: a name under stages/ or a path.")]
Slots = Annotated[int, typer.Option(min=1, help="Conversations written side by side.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="Stop after so many minutes of training.")]
TokensPerBatch = Annotated[int, typer.Option(min=64, help="Padding included.")]
LearningRate = Annotated[float, typer.Option(min=0, help="Its highest value.")]


def sentences_of_heads() -> AbstractContextManager[None]:
    """Show what the reader can mend as its sentence alone, and exit with 1."""
    from ..bench.stages_door import BadInput

    return sentences(1, ModelError, BadInput)


def device_of(name: str) -> str:
    import torch

    usable = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if usable else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelError(f"--device {name!r} is not allowed; choose one of auto, cpu, cuda.")
    if name == "cuda" and not usable:
        raise ModelError("--device 'cuda', but torch finds no GPU here; use 'cpu' or leave it out.")
    return name


def train_head(
    target: Target,
    out: Annotated[Path, typer.Argument(file_okay=False, help="Where the head goes.")],
    text: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the training text; OUT/text if not given.")
    ] = None,
    text_only: Annotated[bool, typer.Option("--text-only", help="Stop when the text is written.")] = False,
    train_only: Annotated[bool, typer.Option("--train-only", help="Take the text as it is.")] = False,
    conversations: Conversations = 16384,
    held_out: Annotated[int, typer.Option(min=1, help="How many more are kept for eval-head.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Limit of most answers.")] = 512,
    max_length: Annotated[int, typer.Option(min=128, help="Longest sequence, prompt included.")] = 2048,
    stage: Writer = "part4_worker",
    slots: Slots = 64,
    steps: Steps = None,
    minutes: Minutes = None,
    algorithm: Annotated[str, typer.Option(help="EAGLE or EAGLE3.")] = "EAGLE",
    draft_vocab_size: Annotated[
        int, typer.Option(min=16, help="Tokens an EAGLE3 head proposes: the text's most frequent.")
    ] = 8192,
    passes: Annotated[int, typer.Option(min=1, help="Draft steps unrolled in training.")] = 4,
    tokens_per_batch: TokensPerBatch = 32768,
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="The target's if not given.")] = None,
    learning_rate: LearningRate = 1e-3,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Train a draft head on text that the target writes itself. Run it again to go on where it stopped."""
    from .head_data import TextSettings
    from .head_train import Settings, train
    from .head_writer import write_text_with

    with sentences_of_heads():
        if text_only and train_only:
            raise ModelError("--text-only and --train-only together leave nothing to do; give one of them.")
        folder, where, text = find_model(target), device_of(device), text or out / "text"
        settings = None
        if not text_only:
            settings = Settings(
                steps=steps,
                minutes=minutes,
                algorithm=algorithm.upper(),
                draft_vocab_size=draft_vocab_size,
                passes=passes,
                tokens_per_batch=tokens_per_batch,
                intermediate_size=intermediate_size,
                learning_rate=learning_rate,
                seed=seed,
            )
        if not train_only:
            wanted = TextSettings(
                conversations=conversations,
                held_out=held_out,
                max_new_tokens=max_new_tokens,
                max_length=max_length,
                seed=seed,
            )
            manifest = write_text_with(stage, folder, text, wanted, where, slots)
            typer.echo(f"{manifest['answer_tokens']:,} answer tokens in {text}")
        if settings is not None:
            totals = train(folder, text, out, settings, where)
            agreement = " ".join(f"{rate:.3f}" for rate in totals["agreement"])
            typer.echo(f"{totals['step']} steps, {totals['seconds']} s; agreement {agreement}; head in {out}")


def eval_head(
    target: Target,
    head: Annotated[str, typer.Argument(help="A head in the cache, or a folder.")],
    text: Annotated[Path | None, typer.Option(file_okay=False, help="Folder with held-out answers.")] = None,
    questions: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file of user turns, answered with the end ignored."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many held-out answers.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Cut held-out answers to this length.")
    ] = None,
    cut_loops: Annotated[
        bool, typer.Option("--cut-loops", help="Cut held-out answers where they only repeat themselves.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the answers to QUESTIONS.")] = 256,
    shape: Annotated[
        list[str] | None, typer.Option(help="steps/topk/tokens, such as 3/1/4; may be repeated.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Compare with the engine of this stage, such as part4_worker.")
    ] = None,
    engine_prompts: Annotated[int, typer.Option(min=1, help="Prompts of that comparison.")] = 4,
    engine_tokens: Annotated[int, typer.Option(min=2, help="Their answers' length.")] = 64,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the numbers to this JSON file.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Tokens per round of a head, for chains of 1 to 5 and for trees, on answers it was not trained on."""
    from rich.console import Console
    from rich.table import Table

    from ..bench.configurations import read_shape
    from ..bench.stages_door import resolve_stage
    from .head_eval import CHAINS, TREES
    from .head_report import evaluate

    with sentences_of_heads():
        found = evaluate(
            find_model(target),
            find_model(head),
            text,
            questions,
            device_of(device),
            limit=limit,
            max_tokens=max_tokens,
            cut_loops=cut_loops,
            new_tokens=new_tokens,
            shapes=[read_shape(text) for text in shape] if shape else CHAINS + TREES,
            open_engine=resolve_stage(engine).open if engine else None,
            engine_prompts=engine_prompts,
            engine_tokens=engine_tokens,
        )
    console = Console()
    for section in ("held_out", "questions"):
        if section in found:
            table = Table("shape", "tokens per round", "acceptance by depth", title=section)
            for row in found[section]["shapes"]:
                rates = " ".join(f"{rate:.3f}" for rate in row["acceptance"])
                table.add_row(_shape_name(row), f"{row['tokens_per_round']:.3f}", rates)
            console.print(table)
    for row in found.get("engine", []):
        verdict = "agrees" if row["agrees"] else "DISAGREES"
        numbers = f"{row['engine']:.3f}, simulation {row['simulation']:.3f}"
        console.print(f"engine {_shape_name(row)}: {numbers}: {verdict}")
    if out is not None:
        write_json(out, found)
    if not all(row["agrees"] for row in found.get("engine", [])):
        raise typer.Exit(1)


def _shape_name(row: dict) -> str:
    return f"{row['steps']}/{row['topk']}/{row['draft_tokens']}"


def convert_head(
    source: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of the published head.")
    ],
    out: Annotated[Path, typer.Argument(file_okay=False, help="Where the converted head goes.")],
    target: Annotated[str | None, typer.Option(help="Check the head against this target.")] = None,
) -> None:
    """Turn a published EAGLE or EAGLE-3 head's pytorch_model.bin into a safetensors folder."""
    import json

    from .head_convert import convert_head as convert

    with sentences_of_heads():
        config = None
        if target is not None:
            config = json.loads((find_model(target) / "config.json").read_text(encoding="utf-8"))
        typer.echo(convert(source, out, config))


def token_map(
    text: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="What train-head wrote.")],
    out: Annotated[Path, typer.Argument(dir_okay=False, help="Where the map goes, such as hot.pt.")],
    size: Annotated[int, typer.Option(min=16, help="How many tokens.")] = 8192,
) -> None:
    """List the most frequent tokens of a text, for an engine's speculative_token_map."""
    from .head_vocab import write_token_map

    with sentences_of_heads():
        found = write_token_map(text, out, size)
        parts = " and ".join(
            f"{100 * found[name]:.2f} % of the {name.replace('_', '-')} answers"
            for name in ("training", "held_out")
            if name in found
        )
        typer.echo(f"{found['tokens']:,} tokens, {parts}; map in {out}")


def register(app: typer.Typer) -> None:
    """Add the four commands to `app`."""
    app.command("train-head")(train_head)
    app.command("eval-head")(eval_head)
    app.command("convert-head")(convert_head)
    app.command("token-map")(token_map)
