"""`fledge models distill-draft`; `register` adds it to `models`."""

from pathlib import Path
from typing import Annotated

import typer

from .cache import find_model, models_root
from .head_cli import (
    Conversations,
    Device,
    LearningRate,
    Minutes,
    Slots,
    Steps,
    Target,
    TokensPerBatch,
    Writer,
    device_of,
    sentences_of_heads,
)


def distill_draft(
    target: Target,
    out: Annotated[
        Path | None,
        typer.Argument(
            file_okay=False, help="Where the draft goes; the cache, as TARGET-draft, if not given."
        ),
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers of the target that stay; -1 is its last.")] = "0,1,2,3",
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Text that train-head wrote; not given: it is written."
        ),
    ] = None,
    conversations: Conversations = 256,
    held_out: Annotated[int, typer.Option(min=1, help="How many more are kept to measure on.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Limit of an answer.")] = 192,
    stage: Writer = "part4_worker",
    slots: Slots = 64,
    steps: Steps = None,
    minutes: Minutes = None,
    tokens_per_batch: TokensPerBatch = 4096,
    learning_rate: LearningRate = 3e-4,
    fit_tokens: Annotated[int, typer.Option(min=1, help="Positions that the start is fitted on.")] = 65536,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Make a small draft model for STANDALONE out of its target. Run it again to go on where it stopped."""
    from .draft_distill import DistillSettings, distill, read_layers
    from .head_data import TextSettings
    from .head_writer import write_text_with

    with sentences_of_heads():
        folder, where = find_model(target), device_of(device)
        out = out or models_root() / f"{folder.name}-draft"
        settings = DistillSettings(
            layers=read_layers(layers, folder),
            steps=steps,
            minutes=minutes,
            tokens_per_batch=tokens_per_batch,
            learning_rate=learning_rate,
            fit_tokens=fit_tokens,
            seed=seed,
        )
        if text is None:
            text = out / "text"
            wanted = TextSettings(
                conversations=conversations,
                held_out=held_out,
                max_new_tokens=max_new_tokens,
                long_share=0.0,
                past_end_tokens=max_new_tokens,
                seed=seed,
            )
            write_text_with(stage, folder, text, wanted, where, slots)
        totals = distill(folder, text, out, settings, where)
        told = f"{totals['step']} steps, {totals['seconds']} s; agreement {totals['agreement'][0]:.3f}"
        for chain, number in totals.get("tokens_per_round", {}).items():
            told += f"; {number:.2f} tokens per round with {chain} drafted"
        typer.echo(f"{told}; draft in {out}")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("distill-draft")(distill_draft)
