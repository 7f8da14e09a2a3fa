"""The engine's kernels, twice: `native` in plain PyTorch and `triton`, with the same functions in both.

Nothing else in the engine imports either: it asks load_kernels for one of them and calls what it gets.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from .host_metadata import HostMetadata

__all__ = ["KERNEL_SETS", "HostMetadata", "check_device", "load_kernels"]

KERNEL_SETS = ("native", "triton")


def load_kernels(name: str) -> ModuleType:
    """The module that holds one set of kernels, all functions flat. Triton is imported only if chosen.

    Raises:
        ValueError: the set is unknown, or needs a package that is not installed.
    """
    if name not in KERNEL_SETS:
        raise ValueError(f"There is no kernel set {name!r}; there are {' and '.join(KERNEL_SETS)}.")
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if name == "triton" and error.name == "triton":
            raise ValueError("The triton kernels need the package triton, which is not installed.") from error
        raise


def check_device(name: str, device: str | torch.device) -> None:
    """Refuse a set of kernels that cannot run on a device.

    Raises:
        ValueError: triton on a device other than a GPU, unless its interpreter is switched on.
    """
    if name == "triton" and torch.device(device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"The triton kernels cannot run on {str(device)!r}: they need a CUDA device, or "
            "TRITON_INTERPRET=1 in the environment before the program starts (slow, for tests). "
            "Use 'torch_native' instead."
        )
