"""The two sets of kernels are one interface, chosen by name and refused where they cannot run."""

import inspect
import subprocess
import sys

import pytest

from stages.part4_worker.kernels import check_device, load_kernels


def test_both_sets_have_the_same_functions_and_arguments(native, triton_kernels):
    assert native.__all__ == triton_kernels.__all__
    for name in native.__all__:
        first, second = getattr(native, name), getattr(triton_kernels, name)
        if inspect.isfunction(first):
            assert inspect.signature(first) == inspect.signature(second), name
        else:
            assert first == second


@pytest.mark.slow
def test_native_does_not_import_triton():
    program = (
        "import sys; from stages.part4_worker.kernels import load_kernels; load_kernels('native'); "
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_set_is_named():
    with pytest.raises(ValueError, match="'cutlass'.*native and triton"):
        load_kernels("cutlass")


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_device("native", "cpu")
    check_device("triton", "cuda")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        check_device("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_device("triton", "cpu")
