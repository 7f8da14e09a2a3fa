"""Training text: questions and answers that the target writes itself, kept as shards of token ids.

A head must learn what its target says, so the target says it: it writes user turns from its bare chat
template, then answers them, mostly greedily (that is where drafting pays) and partly past its end of turn,
because benchmarks ignore it. Whoever generates is a plain function, so that an engine and a test's fake both
fit.
"""

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cache import ModelError, write_json
from .head_progress import progress_bar

# (prompts, each one's sampling parameters in the engine's words, a function to tell how many more are
# finished) -> the answers' tokens, end of turn included
Generate = Callable[[list[list[int]], list[dict[str, Any]], Callable[[int], None]], list[list[int]]]

KINDS = ("greedy", "past_end", "warm", "hot")
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
QUESTIONS_PER_CALL = 4096  # and then they are saved
HELD_OUT = "held-out.npz"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TextSettings:
    """What to write. `shares` are the parts of KINDS; `past_end` answers have `past_end_tokens` tokens.

    Most answers may have `max_new_tokens`, a `long_share` of them whatever `max_length` leaves. The first
    `held_out` questions are answered greedily into a file that training never reads.
    """

    conversations: int = 16384
    held_out: int = 512
    shares: tuple[float, ...] = (0.62, 0.10, 0.16, 0.12)
    max_length: int = 2048
    max_new_tokens: int = 512
    long_share: float = 0.10
    past_end_tokens: int = 320
    max_question_tokens: int = 160
    shard_conversations: int = 4096
    seed: int = 0


@dataclass
class Text:
    """Conversations end to end: tokens `[total]`; the rest `[n]`, kinds uint8, others int64."""

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> np.ndarray:
        """One conversation's tokens, int64."""
        start = self.starts[number]
        return self.tokens[start : start + self.lengths[number]].astype(np.int64)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int]], prompt_lengths: Sequence[int], kinds: Sequence[int]
    ) -> "Text":
        """Join rows of tokens."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if len(rows) else lengths
        return cls(
            _narrow(tokens),
            np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(rows) else lengths,
            lengths,
            np.array(prompt_lengths, dtype=np.int64),
            np.array(kinds, dtype=np.uint8),
        )


def _narrow(tokens: np.ndarray) -> np.ndarray:
    # Two bytes a token where the vocabulary allows: shards travel.
    return tokens.astype(np.uint16 if tokens.max(initial=0) < 2**16 else np.uint32)


def _save(path: Path, text: Text) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=text.tokens,
            lengths=text.lengths,
            prompt_lengths=text.prompt_lengths,
            kinds=text.kinds,
        )
    os.replace(partial, path)


def load_text(folder: str | os.PathLike, held_out: bool = False) -> Text:
    """All training text of a folder, or its held-out answers. Raises ModelError if there is none."""
    folder = Path(folder)
    paths = [folder / HELD_OUT] if held_out else sorted(folder.glob("shard-*.npz"))
    if not paths or not all(path.is_file() for path in paths):
        raise ModelError(f"There is no {'held-out' if held_out else 'training'} text in {folder}.")
    parts = [np.load(path) for path in paths]
    lengths = np.concatenate([part["lengths"] for part in parts])
    return Text(
        np.concatenate([part["tokens"] for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        lengths.astype(np.int64),
        np.concatenate([part["prompt_lengths"] for part in parts]).astype(np.int64),
        np.concatenate([part["kinds"] for part in parts]),
    )


class Template:
    """A tokenizer's chat template, cut where the user's words go; `before` has the default system prompt."""

    MARK = "\u2983fledge\u2984"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        turns = [{"role": "user", "content": self.MARK}]
        whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        if whole.count(self.MARK) != 1:
            raise ModelError("The tokenizer's chat template does not show a user's turn exactly once.")
        self.before, self.after = whole.split(self.MARK)
        self.end = tokenizer.eos_token_id
        self.start_ids = self.encode([self.before])[0]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids without anything added."""
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def prompts(self, questions: list[str]) -> list[list[int]]:
        """The ids of whole prompts, as a user's request would be tokenised."""
        return self.encode([self.before + question + self.after for question in questions])


def is_sane(question: str) -> bool:
    """Whether a question is worth answering: not tiny, in the target's alphabet, free of template text."""
    if not 3 <= len(question) <= 1000 or "<|" in question:
        return False
    return sum(c.isascii() for c in question) >= 0.9 * len(question) and any(c.isalpha() for c in question)


def write_questions(
    template: Template, generate: Generate, count: int, settings: TextSettings, path: Path
) -> list[str]:
    """At least `count` different user turns sampled by the target; those in the file at `path` are kept."""
    questions = path.read_text(encoding="utf-8").split("\x1e") if path.is_file() else []
    seen = {" ".join(question.lower().split()) for question in questions}
    with progress_bar() as progress:
        task = progress.add_task("questions", total=count, completed=min(count, len(questions)))
        while len(questions) < count:
            known = len(questions)
            # About a fifth is lost to the filters; a round too many costs little.
            asked = min(QUESTIONS_PER_CALL, int(1.3 * (count - known)) + 64)
            seeds = random.Random(f"{settings.seed} questions {known}")
            parameters = [
                {
                    "temperature": 1.0,
                    "max_new_tokens": settings.max_question_tokens,
                    "sampling_seed": seeds.getrandbits(31),
                }
                for _ in range(asked)
            ]
            answers = generate([template.start_ids] * asked, parameters, lambda finished: None)
            whole = [ids[:-1] for ids in answers if ids and ids[-1] == template.end]
            for text in template.tokenizer.batch_decode(whole):
                question = text.strip()
                key = " ".join(question.lower().split())
                if is_sane(question) and key not in seen:
                    seen.add(key)
                    questions.append(question)
            if len(questions) - known < 0.02 * asked:
                raise ModelError(
                    f"Of {asked} sampled user turns {len(questions) - known} were new and usable; "
                    "this target does not write questions from its chat template."
                )
            partial = path.with_name(path.name + ".partial")
            partial.write_text("\x1e".join(questions), encoding="utf-8")
            os.replace(partial, path)
            progress.update(task, completed=min(count, len(questions)))
    return questions


def without_loop(answer: list[int], longest: int = 48, keep: int = 3) -> list[int]:
    """Cut an answer that ends by repeating itself to `keep` rounds of that; others come back unchanged.

    A greedy small model often falls into a loop; hundreds of rounds teach a head nothing that the first few
    do not.
    """
    ids = np.asarray(answer)
    for period in range(1, longest + 1):
        same = ids[period:] == ids[:-period]
        run = len(same) if same.all() else int(np.argmax(~same[::-1]))
        if run >= (keep + 2) * period and run >= 32:
            return answer[: len(answer) - run + (keep - 1) * period]
    return answer


def write_answers(
    template: Template,
    generate: Generate,
    prompts: list[list[int]],
    settings: TextSettings,
    held_out: bool,
    seed: int,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Text:
    """Answer the prompts in the mix of kinds, greedily where held out; one-token answers are dropped."""
    chance = np.random.default_rng([settings.seed, seed])
    shares = np.array(settings.shares) / sum(settings.shares)
    kinds = np.zeros(len(prompts), int) if held_out else chance.choice(len(KINDS), len(prompts), p=shares)
    long = chance.random(len(prompts)) < (0.0 if held_out else settings.long_share)
    parameters = []
    for prompt, kind, is_long in zip(prompts, kinds, long, strict=True):
        room = settings.max_length - len(prompt)
        limit = settings.past_end_tokens if KINDS[kind] == "past_end" else settings.max_new_tokens
        parameters.append(
            {
                "temperature": TEMPERATURES[kind],
                "max_new_tokens": room if is_long and KINDS[kind] != "past_end" else min(limit, room),
                "ignore_eos": KINDS[kind] == "past_end",
                "sampling_seed": int(chance.integers(2**31)),
            }
        )
    # The longest first, so that the last of a call are not a few long ones.
    order = sorted(range(len(prompts)), key=lambda i: -parameters[i]["max_new_tokens"])
    answers = generate([prompts[i] for i in order], [parameters[i] for i in order], on_finished)
    rows, prompt_lengths, row_kinds = [], [], []
    for i, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0]):
        # Loops run into a limit, so an answer that ended by itself need not be searched.
        if not held_out and answer and answer[-1] != template.end:
            answer = without_loop(answer)
        if len(answer) >= 2:
            rows.append([*prompts[i], *answer])
            prompt_lengths.append(len(prompts[i]))
            row_kinds.append(kinds[i])
    return Text.from_rows(rows, prompt_lengths, row_kinds)


def _describe(file: str, text: Text) -> dict[str, Any]:
    answers = text.lengths - text.prompt_lengths
    kinds = {name: int(answers[text.kinds == number].sum()) for number, name in enumerate(KINDS)}
    return {"file": file, "conversations": len(text), "answer_tokens": int(answers.sum()), "by_kind": kinds}


def write_text(
    target: str, tokenizer, generate: Generate, folder: str | os.PathLike, settings: TextSettings
) -> dict:
    """Write questions, held-out answers and shards of training answers; go on where a run there stopped.

    Shards `shard-NNNNN.npz` hold `tokens`, `lengths`, `prompt_lengths` and `kinds`; `manifest.json`
    lists them. Returns the manifest. Raises ModelError if the folder was begun with other settings (more
    conversations are fine).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "target": target,
        "settings": asdict(settings) | {"shares": list(settings.shares)},
        "shards": [],
    }
    if (folder / MANIFEST).is_file():
        old = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if {**old["settings"], "conversations": 0} != {**manifest["settings"], "conversations": 0}:
            raise ModelError(f"The text in {folder} was begun with other settings: {old['settings']}.")
        manifest["shards"] = old["shards"]
    template = Template(tokenizer)
    count = settings.conversations + settings.held_out
    questions = write_questions(template, generate, count, settings, folder / "questions.txt")
    usable = [p for p in template.prompts(questions) if len(p) <= settings.max_length - 64][:count]
    size = settings.shard_conversations
    parts = [(HELD_OUT, usable[: settings.held_out])] if settings.held_out else []
    training = usable[settings.held_out :]
    parts += [(f"shard-{i // size:05d}.npz", training[i : i + size]) for i in range(0, len(training), size)]
    done = {shard["file"]: shard["prompts"] for shard in manifest["shards"]}
    with progress_bar() as progress:
        task = progress.add_task("answers", total=sum(len(prompts) for _, prompts in parts))
        for number, (file, prompts) in enumerate(parts):
            if done.get(file, -1) < len(prompts):
                text = write_answers(
                    template, generate, prompts, settings, file == HELD_OUT, number,
                    lambda finished: progress.update(task, advance=finished),
                )  # fmt: skip
                _save(folder / file, text)
                others = [shard for shard in manifest["shards"] if shard["file"] != file]
                entry = {**_describe(file, text), "prompts": len(prompts)}
                manifest["shards"] = sorted([*others, entry], key=lambda shard: shard["file"])
                manifest["answer_tokens"] = sum(
                    s["answer_tokens"] for s in manifest["shards"] if s["file"] != HELD_OUT
                )
                manifest["conversations"] = sum(
                    s["conversations"] for s in manifest["shards"] if s["file"] != HELD_OUT
                )
                write_json(folder / MANIFEST, manifest)
            else:
                progress.update(task, advance=len(prompts))
    return manifest
