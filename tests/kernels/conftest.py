"""What the kernel tests share. Each test runs on the native twin and on the Triton one.

Without a GPU the Triton kernels run in the interpreter; it has to be switched on before triton is imported.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(
            "triton was imported before its interpreter could be switched on: set TRITON_INTERPRET=1 first."
        )
    os.environ["TRITON_INTERPRET"] = "1"

from stages.part4_worker.kernels import load_kernels  # noqa: E402

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:
            continue
        # The interpreter turns a loop's bound into an int in a way that numpy is about to forbid.
        item.add_marker(
            pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
        )
        if HAS_GPU:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session", params=["native", "triton"])
def kernels(request):
    return load_kernels(request.param)


@pytest.fixture(scope="session")
def native():
    return load_kernels("native")


@pytest.fixture(scope="session")
def triton_kernels():
    return load_kernels("triton")


@pytest.fixture(
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["f32", "bf16"]
)
def dtype(request):
    """bfloat16 only on a GPU: the interpreter's tl.dot returns garbage for it."""
    return request.param


@pytest.fixture
def tolerance(dtype):
    """Absolute error allowed for values of the order of one."""
    return 1e-5 if dtype == torch.float32 else 3e-2
