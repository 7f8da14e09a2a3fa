"""What all tests share: threads, seeds, skips without a GPU, and the folders of the embedded model."""

import os

# Before torch is imported anywhere. Tiny models lose more to waking threads than they win; `make test` runs
# two processes. No test may reach for a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random  # noqa: E402
import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tools.models.cache import ModelError, model_path  # noqa: E402

# Its asserts say what was expected and what came, as those of test files do.
pytest.register_assert_rewrite("tests.contract.probe")

# A slow machine is no failure, and a run must fail for the same example every time.
hypothesis.settings.register_profile("fledge", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fledge")


GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not GPUS:
    # Read when triton is imported, so it must not depend on which tests run first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are, or a browser where there is none; nothing else, ever.

    Where `CI` is set a missing browser is a failure: .ci/run installs one.
    """
    needs = {"gpu": 1, "multi_gpu": 2}
    for item in items:
        for name, count in needs.items():
            if item.get_closest_marker(name) and count > GPUS:
                item.add_marker(pytest.mark.skip(reason=f"{name}: CUDA GPUs needed {count}, found {GPUS}"))
        if item.get_closest_marker("browser") and BROWSER is None and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason="browser: none found, as in `apt install chromium`"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same random numbers for each test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def cached_model(name: str) -> Path:
    try:
        return model_path(name)
    except ModelError as error:
        pytest.fail(f"{error} (`make test` does that before it starts pytest.)", pytrace=False)


@pytest.fixture(scope="session")
def target_path() -> Path:
    """The folder of the embedded target model; fails, and never skips, where it has not been fetched."""
    return cached_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def head_path() -> Path:
    """The folder of the target's draft head; fails, and never skips, where it has not been fetched."""
    return cached_model("smollm2-135m-eagle")
