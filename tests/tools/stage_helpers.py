"""Made-up stages in a repository of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.stages import story

NAMES = story.ORDER[:4]
COMMITS = [digit * 40 for digit in "abcd"]


class MadeUp:
    """A git repository with the first four stages; each has a package, stage.toml and one README."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name, commit in zip(NAMES, COMMITS, strict=True):
            self.write(name, "__init__.py", '"""A stage."""\n')
            self.write(name, "README.md", f"{name}\n")
            self.toml(name, commit=commit)
        self.git("init", "--quiet")
        self.git("config", "user.name", "Test")
        self.git("config", "user.email", "test@example.invalid")
        self.commit()

    def path(self, name: str, path: str) -> Path:
        return self.folder / "stages" / name / path

    def write(self, name: str, path: str, text: str) -> None:
        self.path(name, path).parent.mkdir(parents=True, exist_ok=True)
        self.path(name, path).write_text(text)

    def write_all(self, path: str, text: str) -> None:
        for name in NAMES:
            self.write(name, path, text)

    def texts(self, path: str) -> list[str | None]:
        """The content in each stage, None where there is no such file."""
        paths = [self.path(name, path) for name in NAMES]
        return [path.read_text() if path.is_file() else None for path in paths]

    def toml(self, name: str, more: str = "", commit: str = "e" * 40) -> None:
        upstream = f'[upstream]\ncommit = "{commit}"\npull = 1\ndate = "2025-01-02"\n'
        head = f'name = "{name}"\ntitle = "About {name}"\n{upstream}[features]\npresent = ["page"]\n'
        self.write(name, "stage.toml", head + more)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True
        )
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "made up")
