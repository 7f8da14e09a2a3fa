"""What this reader has answered: `quiz.json` in the cache folder ($FLEDGE_CACHE, or ~/.cache/fledge)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ..models.cache import cache_root, write_json


@dataclass
class Progress:
    """Question id → how often it was answered wrongly, and which are answered rightly."""

    tries: dict[str, int] = field(default_factory=dict)
    right: list[str] = field(default_factory=list)

    @classmethod
    def load(cls) -> Progress:
        """An empty one where there is none; a file that cannot be read is kept aside, not overwritten."""
        path = progress_path()
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                {str(name): int(count) for name, count in table["tries"].items()}, list(table["right"])
            )
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            path.replace(path.with_name(path.name + ".unreadable"))
            return cls()

    def save(self) -> None:
        progress_path().parent.mkdir(parents=True, exist_ok=True)
        write_json(progress_path(), {"tries": self.tries, "right": self.right})

    def note(self, question: str, is_right: bool) -> int:
        """Keep one more answer, on disk too; returns how many wrong ones there were since a right one."""
        if is_right:
            self.tries.pop(question, None)
            self.right = sorted({*self.right, question})
        else:
            self.tries[question] = self.tries.get(question, 0) + 1
        self.save()
        return self.tries.get(question, 0)


def progress_path() -> Path:
    return cache_root() / "quiz.json"
