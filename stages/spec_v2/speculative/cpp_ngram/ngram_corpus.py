"""What was said before, and what of it may come next. Restates sglang/srt/speculative/cpp_ngram.

A trie holds every run of up to `max_trie_depth` tokens. There is one for each request, of its own prompt and
output, and one that all requests share. The node of a request's last L tokens knows what came behind them
before, so its children are drafts, and theirs again. The longest match is asked first, in the request's own
trie before the shared one; shorter ones add breadth, and what lies deeper, until the tree is full. A match of
one token proposes up to `max_bfs_breadth` children, the longest `min_bfs_breadth`, those between accordingly;
what hangs on a draft is asked as a match that is longer by it.

All tries take their nodes from one pool. Where it is empty, the leaf that has not been said for longest goes.

The work is done in C++ (ngram_corpus.cpp), which is compiled when it is first needed and kept in the cache
under the hash of its source.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...models.paths import cache_dir
from .ngram_twin import NgramTwin

if TYPE_CHECKING:
    from ...server_args import ServerArgs

SOURCE = Path(__file__).with_name("ngram_corpus.cpp")
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")
_INSTEAD = "or set FLEDGE_NGRAM=python in the environment for the slower matching in Python"


class NgramCorpus:
    """
    Args:
        capacity: the most nodes of all tries together, about 50 bytes each.
        max_trie_depth: the longest run of tokens that is kept, 2 or more.
        min_bfs_breadth, max_bfs_breadth: children that the longest and the shortest match propose.
        match_type: "BFS": the tree grows level by level, by what was said last; "PROB": by what was said
            most often, the most probable draft first.

    Raises:
        RuntimeError: there is no compiler, or it fails.
        MemoryError: from whatever needs more nodes, where there is no memory for them.
    """

    def __init__(
        self,
        capacity: int,
        max_trie_depth: int = 18,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 10,
        match_type: str = "BFS",
    ):
        self._handle = None
        self._library = load_library()
        self._handle = self._library.ngram_new(
            capacity, max_trie_depth, min_bfs_breadth, max_bfs_breadth, match_type == "PROB"
        )
        _check(self._handle is None)

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.ngram_delete(self._handle)

    @property
    def size(self) -> int:
        """Nodes in use, roots included."""
        return self._library.ngram_size(self._handle)

    def append(self, requests: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Each of `requests` goes on with its `tokens`. One that is not known begins with them."""
        ids, runs = _longs(requests), _flat(tokens)
        _check(self._library.ngram_append(self._handle, ids, *runs, len(ids)))

    def forget(self, request: int) -> None:
        """A request's own trie goes; what it has said stays in the shared one."""
        _check(self._library.ngram_forget(self._handle, request))

    def match(
        self, requests: Sequence[int], num_draft_tokens: int, said: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        """The trees to verify: int64 [5, bs, num_draft_tokens], at most 64 of them.

        `said` is what each request has said and `append` will be told later: the matches end with it, and
        nothing in it is found yet. To look up takes a fraction of the time that it takes to remember.

        Row 0 of a tree is the request's last token, and a parent comes before its children. The fields:
        tokens; mask bits (row i sees row j); depths; each row's first child and its next sibling, −1 for
        none. Rows to which nothing was found see themselves alone and hang on nobody.
        """
        ids, runs = _longs(requests), _flat(said or [()] * len(requests))
        fields = np.empty((5, len(ids), num_draft_tokens), dtype=np.int64)
        out = fields.ctypes.data
        _check(self._library.ngram_match(self._handle, ids, *runs, len(ids), num_draft_tokens, out))
        return fields


def _longs(numbers: Sequence[int]) -> ctypes.Array:
    """As C has them; an array of numpy's would take longer to hand over than to match."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _flat(runs: Sequence[Sequence[int]]) -> tuple[ctypes.Array, ctypes.Array]:
    """All tokens one after the other, and where each run begins and the last one ends."""
    starts = list(itertools.accumulate(map(len, runs), initial=0))
    return _longs(list(itertools.chain.from_iterable(runs))), _longs(starts)


def make_corpus(server_args: ServerArgs) -> NgramCorpus | NgramTwin:
    """The corpus that the flags ask for, in C++ unless FLEDGE_NGRAM=python.

    Raises:
        ValueError: FLEDGE_NGRAM is something else.
        RuntimeError: see NgramCorpus.
    """
    language = os.environ.get("FLEDGE_NGRAM", "cpp")
    if language not in ("cpp", "python"):
        raise ValueError(f"FLEDGE_NGRAM={language!r} is not known; set it to 'cpp' or 'python', or leave it.")
    return {"cpp": NgramCorpus, "python": NgramTwin}[language](
        server_args.speculative_ngram_capacity,
        server_args.speculative_ngram_max_trie_depth,
        server_args.speculative_ngram_min_bfs_breadth,
        server_args.speculative_ngram_max_bfs_breadth,
        server_args.speculative_ngram_match_type,
    )


def build_library() -> Path:
    """Compile ngram_corpus.cpp, if that has not been done; the library's path.

    It is written under another name first, so that processes that build at once do not disturb one another.
    """
    compiler = os.environ.get("CXX", "g++")
    key = hashlib.sha256("\0".join((compiler, *_FLAGS)).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_dir() / "ngram" / f"ngram_corpus-{platform.machine()}-{key}.so"
    if library.is_file():
        return library
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"NGRAM matches in C++, and there is no compiler {compiler!r} here: install g++, name another "
            f"in CXX, {_INSTEAD}."
        )
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *_FLAGS, str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                made.replace(library)
    except OSError as error:
        raise RuntimeError(
            f"NGRAM's library cannot be put into {library.parent} ({error}): set FLEDGE_CACHE to a folder "
            f"that can be written, {_INSTEAD}."
        ) from error
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), "nothing")
        raise RuntimeError(
            f"{compiler} does not compile {SOURCE.name} (it says: {said}): name another compiler in CXX, "
            f"{_INSTEAD}."
        )
    return library


@cache
def load_library() -> ctypes.CDLL:
    """The library with its functions' types."""
    library = ctypes.CDLL(str(build_library()))
    handle, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    array = ctypes.c_void_p  # of int64
    types = {
        "ngram_new": (handle, number, small, small, small, small),
        "ngram_delete": (None, handle),
        "ngram_size": (number, handle),
        "ngram_append": (ctypes.c_int, handle, array, array, array, number),
        "ngram_forget": (ctypes.c_int, handle, number),
        "ngram_match": (ctypes.c_int, handle, array, array, array, number, small, array),
    }
    for name, (returned, *arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returned, arguments
    return library


def _check(failed: bool | int) -> None:
    if failed:
        raise MemoryError("no memory for more n-grams: lower speculative_ngram_capacity")
