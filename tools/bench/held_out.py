"""The second prompt set of `fledge bench`: questions from a head's held-out text, with their natural end.

    python -m tools.bench.held_out TEXT       TEXT is the folder that `fledge models train-head` wrote

Taken are the first questions, in the order of the file, whose held-out answer ended by itself and whose
prompt is no prompt of the training text. Answers that ran into the limit are mostly loops, and loops flatter
a drafter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..models.cache import ModelError, find_model, sha256_of, write_json
from ..models.head_data import HELD_OUT, Template, load_text

FILE = Path(__file__).with_name("held_out.json")
COUNT, NEW_TOKENS = 64, 512


def held_out_questions(folder: Path, template: Template, count: int = COUNT) -> list[str]:
    """The first `count` questions as described above.

    Raises ModelError where the text has fewer, or where a question does not give its prompt again.
    """
    held, training = load_text(folder, held_out=True), load_text(folder)
    seen = {bytes(training.row(i)[: training.prompt_lengths[i]]) for i in range(len(training))}
    questions: list[str] = []
    for number in range(len(held)):
        row = held.row(number)
        prompt = row[: held.prompt_lengths[number]]
        if row[-1] != template.end or bytes(prompt) in seen:
            continue
        text = template.tokenizer.decode(prompt)
        question = text.removeprefix(template.before).removesuffix(template.after)
        if template.prompts([question])[0] != prompt.tolist():
            raise ModelError(f"Question {number} of {folder} does not give its own prompt again.")
        questions.append(question)
        if len(questions) == count:
            return questions
    raise ModelError(f"{folder} holds {len(questions)} questions that ended by themselves, not {count}.")


def describe(folder: Path, questions: list[str]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "about": f"{len(questions)} questions that no draft head was trained on, sent with the model's chat "
        f"template and its default system prompt; up to {NEW_TOKENS} new tokens, the end of turn ends an "
        "answer, greedy.",
        "how": "python -m tools.bench.held_out TEXT, on the text that smollm2-135m-eagle was trained with: "
        "the first questions of its held-out part whose answer ended by itself, none of them a prompt of "
        "the training part.",
        "text_sha256": {path.name: sha256_of(path) for path in sorted(folder.glob("*.npz"))},
        "held_out_file": HELD_OUT,
        "new_tokens": NEW_TOKENS,
        "ignore_eos": False,
        "questions": questions,
    }


def main(
    text: Annotated[Path, typer.Argument(file_okay=False, help="Folder of a head's text.")],
    target: Annotated[str, typer.Option(help="A model in the cache, or a folder.")] = "smollm2-135m-instruct",
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the questions go.")] = FILE,
) -> None:
    """Write the held-out prompt set."""
    from transformers import AutoTokenizer

    template = Template(AutoTokenizer.from_pretrained(find_model(target)))
    write_json(out, describe(text, held_out_questions(text, template)))


if __name__ == "__main__":
    typer.run(main)
