"""The site, built once for all tests that look at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.provenance import REPO


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a strict build."""
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "tools", "docs", "build", "--out", str(out)]
    # Without a clone of upstream's, as a stranger builds it: where there is one, its diffs come in.
    environment = {**os.environ, "FLEDGE_CACHE": str(out.parent / "cache")}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out
