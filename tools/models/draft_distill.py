"""Makes a small model that drafts for STANDALONE: some layers of the target, briefly taught to say the same.

Embedding and LM head stay as they are, so the vocabulary is the target's. The text is what the target wrote
itself, and the loss that of the head trainer, at the same positions; but a whole model reads no hidden
states, so what is learned at a position is what the target says there.
"""

import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import ModelError, publish
from .head_batches import Batch, Feed, endless, free_memory
from .head_data import load_text
from .head_loss import soft_cross_entropy
from .head_model import FrozenTarget
from .head_progress import progress_bar
from .head_train import learning_rate, make_optimizer

_ALONG = ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class DistillSettings:
    """A recipe: `layers` of the target are kept; `steps` or `minutes` ends it, the sooner of the two."""

    layers: int
    steps: int | None = None
    minutes: float | None = None
    tokens_per_batch: int = 16384
    learning_rate: float = 5e-4
    warmup: int = 20
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.steps is None and self.minutes is None:
            raise ModelError("Say when training ends: a number of --steps, of --minutes, or both.")


def kept_layers(of: int, count: int) -> list[int]:
    """Which of `of` layers a draft of `count` keeps: the first, the last, and evenly between them."""
    if not 1 <= count < of:
        raise ModelError(f"A draft has fewer layers than its target's {of}, and at least one; not {count}.")
    return [round(i * (of - 1) / max(count - 1, 1)) for i in range(count)]


def pruned(folder: Path, count: int, device: torch.device) -> tuple[nn.Module, list[int]]:
    """The target in float32 with `count` of its layers, which alone are trained; and which they are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    kept = kept_layers(len(model.model.layers), count)
    model.requires_grad_(False)
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in kept).requires_grad_(True)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = count
    model.model.norm.requires_grad_(True)
    return model.to(device), kept


def batch_loss(draft: nn.Module, target: FrozenTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the target's distribution, and how often the best tokens agree: two means."""
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        states = draft.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    student = states.flatten(0, 1)[batch.targets].to(target.dtype)[None]  # [1, n, h]
    teacher = batch.hidden.flatten(0, 1)[batch.targets]  # [n, h]
    mean = torch.full((1, len(batch.targets)), 1 / len(batch.targets), device=student.device)
    loss, agree = soft_cross_entropy(student, teacher, target.lm_head, mean)
    return loss.sum(), agree.mean()


def distill(
    target_folder: str | os.PathLike,
    text_folder: str | os.PathLike,
    out_folder: str | os.PathLike,
    settings: DistillSettings,
    device: str = "cpu",
) -> dict:
    """Train the draft and write it to `out_folder`, whole or not at all; a model that was there is replaced.

    Returns steps, seconds, and the first and the last batch's loss and agreement. Raises ModelError for a
    text or a number of layers that cannot be used.
    """
    target_folder, out = Path(target_folder), Path(out_folder)
    target, text = FrozenTarget(target_folder, device), load_text(text_folder)
    if not len(text):
        raise ModelError(f"There is no training text in {text_folder}.")
    draft, kept = pruned(target_folder, settings.layers, target.device)
    optimizer = make_optimizer(draft, settings)
    feed = Feed(text, target, free_memory(target.device) // 4)
    places = endless(text.lengths, settings.tokens_per_batch, settings.seed, 0, 0)
    began, step, seen = time.monotonic(), 0, []
    with progress_bar() as progress:
        task = progress.add_task("distilling", total=1.0)
        while (done := _done(settings, step, time.monotonic() - began)) < 1:
            _, _, width, sequences = next(places)
            batch = feed.batch(width, sequences)
            if not len(batch.targets):
                continue
            loss, agree = batch_loss(draft, target, batch)
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, done)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step == 1 or step % 20 == 0 or step == settings.steps:
                seen.append({"step": step, "loss": loss.item(), "agreement": agree.item()})
                if not seen[-1]["loss"] < float("inf"):
                    raise ModelError(f"Training diverged at step {step}. Lower the rate.")
                told = f"step {step}  agreement {seen[-1]['agreement']:.3f}"
                progress.update(task, completed=done, description=told)
    seconds = round(time.monotonic() - began, 1)
    totals = {"step": step, "seconds": seconds, "first": seen[0], "last": seen[-1]} if seen else {"step": 0}
    about = {"settings": asdict(settings), "kept_layers": kept, "totals": totals}
    cuda = target.device.type == "cuda"
    about["device"] = torch.cuda.get_device_name(target.device) if cuda else platform.machine()
    _save(draft, target_folder, out, about)
    return totals


def _done(settings: DistillSettings, step: int, seconds: float) -> float:
    """The part of the run that is over, 0 to 1."""
    by_step = 0.0 if settings.steps is None else step / settings.steps if settings.steps else 1.0
    by_time = 0.0 if settings.minutes is None else seconds / max(60 * settings.minutes, 1e-9)
    return max(by_step, by_time)


def _save(draft: nn.Module, target_folder: Path, out: Path, about: dict) -> None:
    """A folder as the target's, its config with fewer layers and its tokenizer along."""
    raw = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    raw |= {"num_hidden_layers": len(draft.model.layers), "torch_dtype": "bfloat16"}
    tensors = draft.state_dict()
    if raw.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        work = Path(folder) / "model"
        work.mkdir()
        cast = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
        save_file(cast, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for file in (file for pattern in _ALONG for file in target_folder.glob(pattern)):
            shutil.copy(file, work)
        publish(work, out, about)
