"""A draft model for STANDALONE: some of its target's layers, trained to say what the target says.

What the layers that stay give is not what the LM head was made for. So a matrix goes between the two, the
"lens", which least squares finds in one go; with it two of thirty layers are right often enough to pay. Then
layers, norm and lens are trained on, briefly, on text that the target wrote; loop and loss are the head
trainer's. In the end the lens is multiplied into the LM head: the result is an ordinary LlamaForCausalLM
folder with an embedding and a head of its own, and with the target's tokenizer.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import ModelError, write_json
from .head_batches import Batch, Feed, epoch_batches, free_memory
from .head_data import Text, load_text
from .head_loss import soft_cross_entropy
from .head_model import FrozenTarget
from .head_progress import progress_bar
from .head_train import Run, go_on, write_record

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CHAIN_STEPS = (1, 3, 5)


@dataclass(frozen=True)
class DistillSettings:
    """A recipe: which `layers` of the target stay, and how long they are trained; see head_train.Settings.

    The lens is fitted on about `fit_tokens` tokens.
    """

    layers: tuple[int, ...]
    steps: int | None = None
    minutes: float | None = None
    tokens_per_batch: int = 4096
    learning_rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.01
    fit_tokens: int = 65536
    seed: int = 0

    # What the head trainer's loop asks for besides: there is one pass, and no hidden state to match.
    passes: ClassVar[int] = 1
    pass_decay: ClassVar[float] = 1.0
    hidden_weight: ClassVar[float] = 0.0
    hidden_until: ClassVar[float] = 1.0

    def __post_init__(self):
        if not self.steps and not self.minutes:
            raise ModelError("Say when training ends: a number of --steps, of --minutes, or both.")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ModelError(
                f"--layers {list(self.layers)}: name at least one, each once, in ascending order."
            )


class DraftModel(nn.Module):
    """The trained part, float32: copies of the target's `layers` and of its final norm, and the lens."""

    def __init__(self, target: FrozenTarget, layers: Sequence[int]):
        super().__init__()
        whole = target.model.model
        count = len(whole.layers)
        if min(layers) < 0 or max(layers) >= count:
            raise ModelError(f"--layers {list(layers)}: the target's are 0 to {count - 1}.")
        config = copy.deepcopy(whole.config)
        config.num_hidden_layers = len(layers)
        with torch.device("meta"):
            self.model = type(whole)(config)
        self.model.embed_tokens = None  # the target's, and as it is
        self.model.layers = nn.ModuleList(copy.deepcopy(whole.layers[i]) for i in layers)
        self.model.norm = copy.deepcopy(whole.norm)
        self.model.rotary_emb = copy.deepcopy(whole.rotary_emb)
        self.lens = nn.Parameter(torch.eye(config.hidden_size, device=target.device))  # [h, h]
        self.float().requires_grad_(True)
        self.target = [target]  # in a list, so that it is no part of this module

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens `[B, L]`, padded on the right → what enters the target's LM head, `[B, L, h]`."""
        return F.linear(self.states(tokens), self.lens.to(self.target[0].dtype))

    def states(self, tokens: Tensor) -> Tensor:
        """What enters the lens."""
        (target,) = self.target
        embeds = F.embedding(tokens, target.embedding).float()
        with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
            states = self.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return states.to(target.dtype)


@torch.no_grad()
def fit_lens(model: DraftModel, batches: Iterable[Batch], tokens: int) -> None:
    """Set the lens to what brings the layers' states nearest to the target's over `tokens` positions or more.

    Ridge regression in float64, the ridge a thousandth of a state's mean square.
    """
    size = len(model.lens)
    gram, product = (torch.zeros(size, size, dtype=torch.float64, device=model.lens.device) for _ in "gp")
    seen = 0
    with progress_bar() as progress:
        task = progress.add_task("fitting the lens", total=tokens)
        for batch in batches:
            x = model.states(batch.tokens).flatten(0, 1)[batch.targets].double()
            gram += x.T @ x
            product += x.T @ batch.hidden.flatten(0, 1)[batch.targets].double()
            seen += len(x)
            progress.update(task, completed=min(seen, tokens))
            if seen >= tokens:
                break
    ridge = 1e-3 * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    model.lens.copy_(torch.linalg.solve(gram, product).T)


def batch_loss(model: DraftModel, target: FrozenTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and `[3, 1]` for the log; see head_train.batch_loss."""
    student = model(batch.tokens).flatten(0, 1)[batch.targets][None]  # [1, n, h]
    teacher = batch.hidden.flatten(0, 1)[batch.targets]
    mean = torch.full(student.shape[:2], 1 / student.shape[1], device=student.device)
    ce, agree = soft_cross_entropy(student, teacher, target.lm_head, mean)
    return ce.sum(), torch.stack([ce.detach(), torch.zeros_like(ce), (agree * mean).sum(dim=1)])


def distill(
    target_folder: str | os.PathLike,
    text_folder: str | os.PathLike,
    out_folder: str | os.PathLike,
    settings: DistillSettings,
    device: str = "cpu",
    log_every: int = 20,
    save_every: float = 60.0,
    on_step: Callable[[int], None] | None = None,
) -> dict:
    """Make a draft model in `out_folder`; go on where a run there stopped. Arguments and errors as `train`'s.

    Returns the last log line with the run's totals and, where the text has answers that were held out,
    `tokens_per_round` of chains on them by their number of steps.
    """
    out, target = Path(out_folder), FrozenTarget(target_folder, device)
    text = load_text(text_folder)
    if not len(text):
        raise ModelError(f"There is no training text in {text_folder}.")
    model = DraftModel(target, settings.layers)
    run = Run(target, out, settings, model)
    feed = Feed(text, target, free_memory(target.device) // 2)
    if not run.checkpoint_path.exists():
        places = epoch_batches(text.lengths, settings.tokens_per_batch, settings.seed, 0)
        fit_lens(model, (feed.batch(*place) for place in places), settings.fit_tokens)
        run.save()

    def losses(batch: Batch, hidden_weight: float) -> tuple[Tensor, Tensor]:
        return batch_loss(model, target, batch)

    go_on(run, feed, losses, log_every, save_every, on_step)
    save_draft(model, target, target_folder, out)
    totals = {**run.line, "step": run.step, "positions": run.positions, "seconds": round(run.seconds, 1)}
    try:
        held_out = load_text(text_folder, held_out=True)
    except ModelError:
        pass
    else:
        totals["tokens_per_round"] = tokens_per_round(model, held_out)
    return write_record(out, settings, text_folder, target, totals, {})


def save_draft(model: DraftModel, target: FrozenTarget, target_folder: str | os.PathLike, out: Path) -> None:
    """Write the folder, config.json last: a folder without it is no model."""
    tensors = {f"model.{name}": t for name, t in model.model.state_dict().items()}
    tensors["model.embed_tokens.weight"] = target.embedding
    tensors["lm_head.weight"] = target.lm_head.float() @ model.lens
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, out / "model.safetensors")
    for name in COPIED_FILES:
        if (file := Path(target_folder) / name).is_file():
            shutil.copyfile(file, out / name)
    count = len(model.model.layers)
    own = {"num_hidden_layers": count, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    write_json(out / "config.json", target.config | own)


@torch.no_grad()
def tokens_per_round(model: DraftModel, text: Text, limit: int = 64) -> dict[str, float]:
    """What greedy chains would give on up to `limit` greedy answers, by number of steps.

    One pass over each answer is enough: as long as a chain is right, its tokens are the answer's.
    """
    (target,) = model.target
    rounds, made = dict.fromkeys(CHAIN_STEPS, 0), dict.fromkeys(CHAIN_STEPS, 0)
    for number in range(min(limit, len(text))):
        row = torch.from_numpy(text.row(number)).to(target.device)
        states = model(row[None])[0, text.prompt_lengths[number] : -1]
        best = (states @ target.lm_head.T).argmax(dim=-1)
        right = (best == row[text.prompt_lengths[number] + 1 :]).tolist()
        for steps in CHAIN_STEPS:
            some, all_made = chain_rounds(right, steps)
            rounds[steps] += some
            made[steps] += all_made
    return {str(steps): round(made[steps] / max(1, rounds[steps]), 4) for steps in CHAIN_STEPS}


def chain_rounds(right: Sequence[bool], steps: int) -> tuple[int, int]:
    """Rounds, and tokens made in them, where `right` says of each token after the first if it is drafted."""
    rounds = at = 0
    while at < len(right):
        accepted = 0
        while accepted < steps and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        at += min(accepted + 1, len(right) - at)
        rounds += 1
    return rounds, at


def read_layers(text: str, target_folder: str | os.PathLike) -> tuple[int, ...]:
    """ "0,1,-1" as numbers of a target's layers; negative ones count from the end. Raises ModelError."""
    config = json.loads((Path(target_folder) / "config.json").read_text(encoding="utf-8"))
    count = config.get("num_hidden_layers", 0)
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ModelError(f"--layers {text!r} is no list of layers such as 0,1,-2,-1.") from None
    return tuple(number + count * (number < 0) for number in numbers)
