"""`Wheel`: the released sglang, read as a zip file. Nothing of it is imported or installed."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

from .history import NoSuchFile, Symbol, UpstreamError
from .symbols import python_symbols

SPECULATIVE_IN_WHEEL = "sglang/srt/speculative"
_FLAGS = "sglang/srt/arg_groups/field_order.py"  # the names of all fields of ServerArgs, as a tuple


class Wheel:
    """An sglang wheel. Paths are those inside it: "sglang/srt/…"."""

    def __init__(self, path: Path) -> None:
        """Raises UpstreamError where `path` is no wheel of sglang."""
        self.path = Path(path)
        self.label = f"the wheel {self.path.name}"
        try:
            self._zip = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise UpstreamError(f"{self.path} is no wheel ({error}).") from None
        words = self.path.name.split("-")
        if words[0] != "sglang" or len(words) < 5:
            raise UpstreamError(f"{self.path.name} is no wheel of sglang.")
        self.version = words[1]
        self._names = sorted(name for name in self._zip.namelist() if not name.endswith("/"))

    def files(self, under: str = SPECULATIVE_IN_WHEEL) -> list[str]:
        """Paths below a folder, sorted."""
        return [name for name in self._names if name.startswith(under.rstrip("/") + "/")]

    def text(self, path: str) -> str:
        """A file's text. Raises NoSuchFile where the wheel has no such file."""
        if path not in self._names:
            raise NoSuchFile(f"{self.label.capitalize()} has no file {path}.")
        return self._zip.read(path).decode("utf-8", errors="replace")

    def line_count(self, path: str) -> int:
        return self.text(path).count("\n")

    def symbols(self, path: str) -> list[Symbol]:
        return python_symbols(self.text(path))

    @property
    def flags(self) -> list[str]:
        """Every field of ServerArgs: a flag `--with-dashes` of the server and a keyword of `Engine`."""
        found = [
            [item.value for item in node.elts if isinstance(item, ast.Constant)]
            for node in ast.walk(ast.parse(self.text(_FLAGS)))
            if isinstance(node, (ast.Tuple, ast.List))
        ]
        return max(found, key=len)
