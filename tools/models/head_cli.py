"""`fledge models train-head · eval-head · convert-head`. `register` adds them to the `models` group."""

from pathlib import Path
from typing import Annotated

import typer


def _folder(name: str) -> Path:
    from .cache import model_path

    return Path(name) if Path(name).is_dir() else model_path(name)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _open_engine(package: str):
    import importlib

    return importlib.import_module(package).Engine


def _write_text(target_folder: Path, text: Path, settings, device: str, writer: str, slots: int) -> dict:
    from transformers import AutoTokenizer

    from .head_data import write_text
    from .head_model import FrozenTarget
    from .head_writer import SlotWriter, engine_writer

    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    if writer == "slots":
        generate = SlotWriter(
            FrozenTarget(target_folder, device),
            tokenizer.eos_token_id,
            slots,
            settings.max_length,
            settings.seed,
        )
        return write_text(target_folder.name, tokenizer, generate, text, settings)
    with _open_engine(writer)(
        model_path=str(target_folder),
        device=device,
        max_running_requests=slots,
        context_length=settings.max_length,
        disable_radix_cache=True,
        log_level="error",
    ) as engine:
        generate = engine_writer(engine, tokenizer.eos_token_id)
        return write_text(target_folder.name, tokenizer, generate, text, settings)


def train_head(
    target: Annotated[str, typer.Argument(help="A model in the cache, or a folder.")],
    out: Annotated[Path, typer.Argument(file_okay=False, help="Where the head goes.")],
    text: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the training text; OUT/text if not given.")
    ] = None,
    text_only: Annotated[bool, typer.Option("--text-only", help="Stop when the text is written.")] = False,
    train_only: Annotated[bool, typer.Option("--train-only", help="Take the text as it is.")] = False,
    conversations: Annotated[int, typer.Option(min=1, help="How many to write.")] = 65536,
    held_out: Annotated[int, typer.Option(min=1, help="How many more are kept for eval-head.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Limit of most answers.")] = 512,
    max_length: Annotated[int, typer.Option(min=128, help="Longest sequence, prompt included.")] = 2048,
    shard_conversations: Annotated[int, typer.Option(min=1, help="Conversations per file of text.")] = 16384,
    writer: Annotated[
        str, typer.Option(help="Who writes: `slots`, or a package with an Engine (stages.part4_worker).")
    ] = "slots",
    slots: Annotated[int, typer.Option(min=1, help="Conversations written side by side.")] = 64,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many minutes of training.")
    ] = None,
    passes: Annotated[int, typer.Option(min=1)] = 4,
    tokens_per_batch: Annotated[int, typer.Option(min=64)] = 32768,
    intermediate_size: Annotated[int | None, typer.Option(min=1, help="The target's if not given.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-3,
    hidden_weight: Annotated[
        float, typer.Option(min=0, help="Weight of the hidden-state loss at first.")
    ] = 0.5,
    hidden_until: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the run in which it fades out.")
    ] = 0.3,
    sharpen: Annotated[float, typer.Option(min=0.1, help="Factor on the target's logits in the loss.")] = 1.0,
    start_from: Annotated[Path | None, typer.Option(file_okay=False, help="Begin with this head.")] = None,
    cache_gb: Annotated[float, typer.Option(min=0, help="Memory for the target's hidden states.")] = 64.0,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train a draft head on text that the target writes itself. Run it again to go on where it stopped."""
    from .cache import ModelError
    from .head_data import TextSettings
    from .head_train import Settings, train

    try:
        folder, where = _folder(target), _device(device)
        settings = None
        if not text_only:
            settings = Settings(
                steps=steps,
                minutes=minutes,
                passes=passes,
                tokens_per_batch=tokens_per_batch,
                intermediate_size=intermediate_size,
                optimizer=optimizer,
                learning_rate=learning_rate,
                hidden_weight=hidden_weight,
                hidden_until=hidden_until,
                sharpen=sharpen,
                seed=seed,
            )
        text = text or out / "text"
        if not train_only:
            text_settings = TextSettings(
                conversations=conversations,
                held_out=held_out,
                max_new_tokens=max_new_tokens,
                max_length=max_length,
                shard_conversations=shard_conversations,
                seed=seed,
            )
            manifest = _write_text(folder, text, text_settings, where, writer, slots)
            typer.echo(f"{manifest['answer_tokens']:,} answer tokens in {text}")
        if settings is not None:
            totals = train(
                folder,
                text,
                out,
                settings,
                where,
                start_from=start_from,
                cache_gb=cache_gb,
            )
            agreement = " ".join(f"{rate:.3f}" for rate in totals["agreement"])
            typer.echo(f"{totals['step']} steps, {totals['seconds']} s; agreement {agreement}; head in {out}")
    except ModelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def eval_head(
    target: Annotated[str, typer.Argument(help="A model in the cache, or a folder.")],
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
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the answers to QUESTIONS.")] = 256,
    engine: Annotated[
        str | None, typer.Option(help="Compare with this package's Engine, such as stages.part4_worker.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the numbers to this JSON file.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Tokens per round of a head, for chains of 1 to 5 and for trees, on answers it was not trained on."""
    from rich.console import Console
    from rich.table import Table

    from .cache import ModelError, write_json
    from .head_report import evaluate

    try:
        found = evaluate(
            _folder(target),
            _folder(head),
            text,
            questions,
            _device(device),
            limit,
            max_tokens,
            new_tokens,
            open_engine=_open_engine(engine) if engine else None,
        )
    except ModelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    console = Console()
    for section in ("held_out", "questions"):
        if section in found:
            table = Table(
                "steps", "topk", "draft tokens", "tokens per round", "acceptance by depth", title=section
            )
            for row in found[section]["shapes"]:
                rates = " ".join(f"{rate:.3f}" for rate in row["acceptance"])
                cells = (
                    row["steps"],
                    row["topk"],
                    row["draft_tokens"],
                    f"{row['tokens_per_round']:.3f}",
                    rates,
                )
                table.add_row(*map(str, cells))
            console.print(table)
    for row in found.get("engine", []):
        shape = f"{row['steps']}/{row['topk']}/{row['draft_tokens']}"
        verdict = "agrees" if row["agrees"] else "DISAGREES"
        console.print(f"engine {shape}: {row['engine']:.3f}, simulation {row['simulation']:.3f}: {verdict}")
    if out is not None:
        write_json(out, found)
    if not all(row["agrees"] for row in found.get("engine", [])):
        raise typer.Exit(1)


def convert_head(
    source: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of the published head.")
    ],
    out: Annotated[Path, typer.Argument(file_okay=False, help="Where the converted head goes.")],
    target: Annotated[str | None, typer.Option(help="Check the head against this target.")] = None,
) -> None:
    """Turn a published EAGLE head's pytorch_model.bin into a safetensors folder."""
    import json

    from .cache import ModelError
    from .head_convert import convert_head as convert

    try:
        config = None
        if target is not None:
            config = json.loads((_folder(target) / "config.json").read_text(encoding="utf-8"))
        typer.echo(convert(source, out, config))
    except ModelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def register(app: typer.Typer) -> None:
    """Add the three commands to `app`."""
    app.command("train-head")(train_head)
    app.command("eval-head")(eval_head)
    app.command("convert-head")(convert_head)
