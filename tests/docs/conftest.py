"""The site, built once for all tests that look at it."""

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
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out
