"""Small git repositories that stand for upstream's, with fixed names and dates, and what is recorded of them.

`main` grows a worker, changes it, renames it and drops another file; two tags stand on the way.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tools.upstream.claims import Claim
from tools.upstream.clone import CloneHistory
from tools.upstream.history import SPECULATIVE
from tools.upstream.ledger import LedgerHistory
from tools.upstream.named import Named
from tools.upstream.record import record

WORKER = f"{SPECULATIVE}/eagle_worker.py"
RENAMED = f"{SPECULATIVE}/eagle_worker_v2.py"
TREE = f"{SPECULATIVE}/build_tree.py"
KERNEL = "sgl-kernel/csrc/verify.cu"
TEXT = """import torch


class Worker:
    def draft(self):
        return "draft"

    @property
    def size(self):
        return 1


if torch:

    def helper():
        return 2
"""


def git(folder: Path, *words: str, day: str = "2025-01-01", **environment: str) -> str:
    """`git WORDS` in a folder, without the settings of whoever runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    fixed = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "A. Author",
        "GIT_AUTHOR_EMAIL": "author@example.org",
        "GIT_COMMITTER_NAME": "C. Committer",
        "GIT_COMMITTER_EMAIL": "committer@example.org",
        "GIT_AUTHOR_DATE": f"{day}T23:30:00-08:00",
        "GIT_COMMITTER_DATE": f"{day}T23:40:00-08:00",
        "GIT_ALLOW_PROTOCOL": "file",
    }
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env=clean | fixed | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"git {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def write(repo: Path, path: str, text: str) -> None:
    (repo / path).parent.mkdir(parents=True, exist_ok=True)
    (repo / path).write_text(text, encoding="utf-8")


def commit(repo: Path, title: str, day: str) -> str:
    git(repo, "add", "-A", day=day)
    git(repo, "commit", "--quiet", "--allow-empty", "-m", title, day=day)
    return git(repo, "rev-parse", "HEAD")


def build(repo: Path, worker: str = TEXT) -> dict[str, str]:
    """The repository in a new folder; returns name → full hash of its commits, oldest first."""
    repo.mkdir(parents=True)
    git(repo, "init", "--quiet", "--initial-branch=main")
    git(repo, "config", "uploadpack.allowFilter", "true")
    hashes = {}
    write(repo, "README.md", "upstream\n")
    hashes["start"] = commit(repo, "Start", "2024-12-28")
    write(repo, WORKER, worker)
    write(repo, TREE, "def build():\n    return []\n")
    hashes["add"] = commit(repo, "Add the worker (#12)", "2025-01-02")
    write(repo, WORKER, worker.replace("return 1", "return 11"))
    write(repo, KERNEL, "__global__ void verify_tree_greedy() {}\n")
    hashes["change"] = commit(repo, "Change the worker (#7)", "2025-01-03")
    git(repo, "tag", "v1")
    git(repo, "mv", WORKER, RENAMED)
    write(repo, RENAMED, worker.replace("return 1", "return 12"))
    hashes["rename"] = commit(repo, "Rename the worker (#30)", "2025-02-01")
    git(repo, "rm", "--quiet", TREE)
    hashes["drop"] = commit(repo, "Drop the tree (#31)", "2025-03-01")
    git(repo, "tag", "-a", "-m", "second", "v2")
    return hashes


def named(hashes: dict[str, str], claims: list[Claim] | None = None, **stage: Any) -> Named:
    """What a course over this repository would name."""
    table = {
        "newest": hashes["drop"],
        "refs": {"v1": hashes["change"], "v2": hashes["drop"], "main": hashes["drop"]},
        "baseline": {"commit": "29f6d408c0"},
        "fetch": {"steps": ["v1", "v0-not-there"]},
        "record": {
            "listed": [SPECULATIVE],
            "also_at": [hashes["add"]],
            "symbols": ["build_tree.py"],
            "logs": [WORKER],
        },
        "groups": {"chapter": {"title": "The parts", "commits": [hashes["change"], hashes["add"]]}},
    }
    return Named(table, {"part1": stage} if stage else {}, claims or [])


def recorded(repo: Path, what: Named) -> LedgerHistory:
    return LedgerHistory(record(CloneHistory(repo), None, what))
