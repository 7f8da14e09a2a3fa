"""The quiz and the exercises as a page shows them: folded questions with hint and answer; what to mend."""

from __future__ import annotations

from pathlib import Path

from ..bench.stages_door import BadInput
from ..exercises.mend import read_exercises
from ..exercises.questions import QUIZ, Question, read_questions
from ..provenance import REPO
from .page import SNIPPETS, Problem, table


def files(repo: Path) -> dict[str, str]:
    """quiz.md: every question, under the page it belongs to; exercises.md: what there is to mend."""
    try:
        questions = read_questions(repo / QUIZ.relative_to(REPO))
        exercises = read_exercises(repo)
    except BadInput as error:
        raise Problem(str(error)) from None
    parts = [
        f"{len(questions)} questions. In the terminal, where your answers are kept: `fledge quiz`. "
        "`git …` is for a clone of SGLang, and `fledge upstream diff` needs one too: "
        "`fledge upstream fetch` makes it.\n"
    ]
    for page in dict.fromkeys(question.page for question in questions):
        own = [question for question in questions if question.page == page]
        parts.append(f"### {_title(repo, page)}\n\n" + "\n".join(map(asked, own)))
    rows = [[f"`{x.id}`", f"`{x.stage}`", x.title] for x in exercises]
    return {
        f"{SNIPPETS}/quiz.md": "\n".join(parts),
        f"{SNIPPETS}/exercises.md": table(["exercise", "stage", "what is seen"], rows),
    }


def asked(question: Question) -> str:
    """One question, closed, with its hint and its answer closed inside it."""
    lines = [f'??? question "{_quoted(question.asks)}"']
    lines += [f"    - {choice}" for choice in question.choices] or [f"    Answer as {question.form}."]
    lines += ["", '    ??? tip "A hint"', f"        {question.hint}"]
    lines += [
        "",
        '    ??? success "The answer"',
        f"        **{question.written(question.answer)}**",
        "",
        f"        {question.because}",
    ]
    lines += ["", *(f"        {line}" for line in ("```", question.shows, "```")), ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace('"', "&quot;")


def _title(repo: Path, page: str) -> str:
    """A link to a page, under its own title."""
    path = repo / "docs" / f"{page}.md"
    if not path.is_file():
        raise Problem(f"quiz.toml: a question belongs to docs/{page}.md, which does not exist.")
    first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()
    return f"[{first.partition(' {')[0]}]({page}.md)" if page != "exercises" else "The chapter's own"
