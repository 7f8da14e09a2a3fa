"""Trains a draft head on text that its target wrote.

Each step runs the unrolled passes on one batch, asks of every pass the target's distribution at the position
it predicts (and, early on, the target's hidden state there), and steps the optimizer. Time goes to the
vocabulary: `head_loss` says how that is kept cheap. A run can be killed at any moment and started again with
the same words.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import ModelError, write_json
from .head_batches import Batch, Feed, endless, free_memory
from .head_data import load_text
from .head_loss import soft_cross_entropy
from .head_model import ARCHITECTURES, FrozenTarget, Head, head_for, rotary_table, save_head
from .head_passes import unrolled_passes
from .head_progress import progress_bar
from .head_vocab import answer_counts, coverages, most_frequent


@dataclass(frozen=True)
class Settings:
    """A recipe. `steps` or `minutes` (of training, earlier runs counted in) ends it; the sooner of the two.

    `hidden_weight` falls linearly to nothing over the first `hidden_until` of the run: matching the hidden
    state gets the head going, then only its distribution counts. An EAGLE3 head, whose state is its own, is
    never asked for the target's, and proposes the `draft_vocab_size` most frequent tokens of the text.
    """

    steps: int | None = None
    minutes: float | None = None
    algorithm: str = "EAGLE"
    draft_vocab_size: int = 8192
    passes: int = 4
    pass_decay: float = 0.8
    tokens_per_batch: int = 32768
    intermediate_size: int | None = None
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    hidden_weight: float = 0.5
    hidden_until: float = 0.3
    seed: int = 0

    def __post_init__(self):
        if not self.steps and not self.minutes:
            raise ModelError("Say when training ends: a number of --steps, of --minutes, or both.")
        if self.algorithm not in ARCHITECTURES:
            raise ModelError(f"algorithm {self.algorithm!r} has no head; use {' or '.join(ARCHITECTURES)}.")
        if self.passes < 1:
            raise ModelError(f"{self.passes} passes: a head needs at least one.")
        if not 0 < self.hidden_until <= 1:
            raise ModelError(f"hidden_until is {self.hidden_until}: a part of the run, above 0 and up to 1.")


def make_optimizer(head: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; only the matrices decay."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = next(head.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(settings: Settings, step: int, done: float) -> float:
    """Linear warm-up over steps, then a cosine to zero over `done`, the part of the run that is over."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def batch_loss(
    head: Head, target: FrozenTarget, batch: Batch, table: Tensor, settings: Settings, hidden_weight: float
) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and `[3, passes]` for the log: cross-entropy, smooth L1, agreement, all means."""
    w = head.weights(target.dtype)
    embeds = F.embedding(batch.tokens, target.embedding)
    outputs = unrolled_passes(head, w, embeds, batch.fed, table, settings.passes)
    numbers = torch.arange(1, settings.passes + 1, device=batch.targets.device)
    student = torch.stack(
        [o.flatten(0, 1).index_select(0, batch.targets - k) for k, o in enumerate(outputs, 1)]
    )  # [passes, n, h]
    teacher = batch.hidden.flatten(0, 1)[batch.targets]  # [n, h]
    valid = (batch.depth[None] >= numbers[:, None]).float()
    own = {}
    if (hot := head.hot_token_id) is not None:
        # Where the text goes on with a token that the head cannot propose, nothing it says is right.
        proposable = torch.zeros(len(target.lm_head), device=hot.device).index_fill_(0, hot, 1.0)
        valid = valid * proposable[batch.tokens.flatten()[batch.targets + 1]]
        own["teacher_head"] = target.lm_head[hot]
    mean = valid / valid.sum(dim=1, keepdim=True).clamp_(min=1)  # [passes, n]
    ce, agree = soft_cross_entropy(head.head_input(w, student), teacher, head.lm_head(w, target), mean, **own)
    distance = torch.zeros_like(ce)
    if head.algorithm == "EAGLE":
        distance = F.smooth_l1_loss(student.float(), teacher.float().expand_as(student), reduction="none")
        distance = (distance.mean(dim=-1) * mean).sum(dim=1)
    decay = settings.pass_decay ** (numbers - 1).float()
    loss = ((ce + hidden_weight * distance) * decay).sum()
    return loss, torch.stack([ce.detach(), distance.detach(), (agree * mean).sum(dim=1)])


class Run:
    """One training run in a folder: `train.jsonl`, `checkpoint.pt`, in the end the head, `training.json`.

    What is trained is a head, or a whole draft model with settings of its own (draft_distill.py).
    """

    STATE = ("step", "epoch", "in_epoch", "seconds", "positions", "line")

    def __init__(self, target: FrozenTarget, folder: Path, settings: Settings, head: nn.Module):
        self.folder, self.settings, self.target, self.head = folder, settings, target, head
        folder.mkdir(parents=True, exist_ok=True)
        self.optimizer = make_optimizer(self.head, settings)
        self.step, self.epoch, self.in_epoch, self.seconds, self.positions = 0, 0, 0, 0.0, 0
        self.line: dict = {}  # the last one of the log
        self.log_path, self.checkpoint_path = folder / "train.jsonl", folder / "checkpoint.pt"
        log_bytes = self._resume() if self.checkpoint_path.exists() else 0
        self.log_file = self.log_path.open("ab")
        # Lines written after the checkpoint will be written again.
        self.log_file.truncate(log_bytes)

    def _resume(self) -> int:
        state = torch.load(self.checkpoint_path, map_location=self.target.device, weights_only=True)
        old, new = state["settings"], asdict(self.settings)
        changed = [key for key in new if key not in ("steps", "minutes") and old.get(key) != new[key]]
        if changed:
            told = ", ".join(f"{key} was {old.get(key)!r} and is {new[key]!r}" for key in changed)
            raise ModelError(f"{self.checkpoint_path} belongs to another recipe: {told}. Use another folder.")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in self.STATE:
            setattr(self, name, state[name])
        return state["log_bytes"]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self.log_file.flush()
        state = {name: getattr(self, name) for name in self.STATE} | {
            "settings": asdict(self.settings),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "log_bytes": self.log_file.tell(),
        }
        partial = self.checkpoint_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint_path)

    def done(self, seconds: float) -> float:
        """The part of the run that is over, 0 to 1."""
        by_step = self.step / self.settings.steps if self.settings.steps else 0.0
        by_time = seconds / (60 * self.settings.minutes) if self.settings.minutes else 0.0
        return max(by_step, by_time)

    def log(self, sums: Tensor, count: int, hidden_weight: float, rate: float) -> dict:
        """Append the means of the last `count` steps as a JSON line; ModelError if training diverged."""
        ce, distance, agree = (sums / count).tolist()
        line = {
            "step": self.step,
            "epoch": self.epoch,
            "positions": self.positions,
            "loss": sum(
                (c + hidden_weight * d) * self.settings.pass_decay**k
                for k, (c, d) in enumerate(zip(ce, distance, strict=True))
            ),
            "cross_entropy": ce,
            "smooth_l1": distance,
            "agreement": agree,
            "learning_rate": rate,
        }
        if not math.isfinite(line["loss"]):
            raise ModelError(
                f"Training diverged at step {self.step}: the loss is {line['loss']}. Lower the rate."
            )
        self.log_file.write((json.dumps(line) + "\n").encode())
        self.log_file.flush()
        self.line = line
        return line


def train(
    target_folder: str | os.PathLike,
    text_folder: str | os.PathLike,
    out_folder: str | os.PathLike,
    settings: Settings,
    device: str = "cpu",
    log_every: int = 20,
    save_every: float = 60.0,
    on_step: Callable[[int], None] | None = None,
) -> dict:
    """Train a head for the target and write it to `out_folder`; go on where a run there stopped.

    The target's hidden states are kept if they fit half of the free memory, and worked out anew each epoch if
    not.

    Args: text_folder from `head_data.write_text`; save_every seconds between checkpoints, each at a log line;
    on_step is called after each step.
    Returns the last log line with the run's totals. Raises ModelError for a text that cannot be used.
    """
    out = Path(out_folder)
    target = FrozenTarget(target_folder, device)
    text = load_text(text_folder)
    if not len(text):
        raise ModelError(f"There is no training text in {text_folder}.")
    hot = None
    if settings.algorithm == "EAGLE3":
        counts = answer_counts(text, len(target.lm_head))
        hot = torch.from_numpy(np.sort(most_frequent(counts, settings.draft_vocab_size)))
    head = head_for(target, settings.intermediate_size, settings.seed, hot)
    run = Run(target, out, settings, head)
    feed = Feed(text, target, free_memory(target.device) // 2, run.head.fed_layers(target))
    table = rotary_table(run.head.config, int(text.lengths.max()) + 64 + settings.passes, target.device)
    table = table.to(target.dtype)

    def losses(batch: Batch, hidden_weight: float) -> tuple[Tensor, Tensor]:
        return batch_loss(head, target, batch, table, settings, hidden_weight)

    go_on(run, feed, losses, log_every, save_every, on_step)
    save_head(run.head, out)
    totals = {**run.line, "step": run.step, "positions": run.positions, "seconds": round(run.seconds, 1)}
    covered = {} if hot is None else {"tokens": len(hot), **coverages(hot.numpy(), text_folder)}
    return write_record(out, settings, text_folder, target, totals, covered)


def go_on(
    run: Run,
    feed: Feed,
    losses: Callable[[Batch, float], tuple[Tensor, Tensor]],
    log_every: int,
    save_every: float,
    on_step: Callable[[int], None] | None,
) -> None:
    """Train from where `run` stands to the end of its recipe; the last checkpoint is that end.

    `losses(batch, hidden_weight)` is what `batch_loss` gives.
    """
    settings = run.settings
    began, saved = time.monotonic() - run.seconds, time.monotonic()
    sums, count = torch.zeros(3, settings.passes, device=run.target.device), 0
    places = endless(feed.text.lengths, settings.tokens_per_batch, settings.seed, run.epoch, run.in_epoch)
    with closing(run.log_file), progress_bar() as progress:
        task = progress.add_task("training", total=1.0, completed=run.done(run.seconds))
        while (done := run.done(time.monotonic() - began)) < 1.0:
            run.epoch, number, width, sequences = next(places)
            batch = feed.batch(width, sequences)
            if len(batch.targets):
                rate = learning_rate(settings, run.step, done)
                hidden_weight = settings.hidden_weight * max(0.0, 1.0 - done / settings.hidden_until)
                loss, parts = losses(batch, hidden_weight)
                run.optimizer.zero_grad(set_to_none=True)
                for group in run.optimizer.param_groups:
                    group["lr"] = rate
                loss.backward()
                torch.nn.utils.clip_grad_norm_(run.head.parameters(), 1.0)
                run.optimizer.step()
                sums += parts
                count += 1
            run.step, run.in_epoch = run.step + 1, number + 1
            run.positions += len(batch.targets)
            if count and run.step % log_every == 0:
                line = run.log(sums, count, hidden_weight, rate)
                sums, count = torch.zeros_like(sums), 0
                run.seconds = time.monotonic() - began
                speed = run.positions / run.seconds
                told = f"step {run.step}  agreement {line['agreement'][0]:.3f}  {speed:,.0f} positions/s"
                progress.update(task, completed=run.done(run.seconds), description=told)
                if time.monotonic() - saved >= save_every:
                    run.save()
                    saved = time.monotonic()
            if on_step is not None:
                on_step(run.step)
        run.seconds = time.monotonic() - began
        if count:
            run.log(sums, count, hidden_weight, rate)
        run.save()


def write_record(
    out: Path, settings: Settings, text_folder, target: FrozenTarget, totals: dict, covered: dict
) -> dict:
    """`training.json`: what the head's card is made from. `covered`: size and coverage of its vocabulary."""
    cuda = target.device.type == "cuda"
    text = json.loads((Path(text_folder) / "manifest.json").read_text(encoding="utf-8"))
    write_json(
        out / "training.json",
        {
            "settings": asdict(settings),
            "totals": totals,
            **({"draft_vocabulary": covered} if covered else {}),
            "text": {key: value for key, value in text.items() if key != "shards"},
            "device": torch.cuda.get_device_name(target.device) if cuda else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
    )
    return totals
