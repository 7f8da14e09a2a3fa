"""What a kernel may read early rests on the order of two calls in the one before it. Only source shows that:
without programmatic dependent launch both are nothing, and with it the wrong order mostly goes well.
"""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

# All that may be launched right before the attention: they write its queries, keys and values.
WRITERS = {
    "layers": ["_rotary_store_kernel"],
    "fused_linear_kernels": ["few_rows_kernel", "sliced_kernel", "tile_kernel"],
}


def calls(kernel, mode: str) -> list[str]:
    """`begin` and `wait_for_inputs` as a kernel makes them in `mode`, in order."""
    (function,) = ast.parse(inspect.getsource(kernel.fn)).body
    found: list[str] = []

    def walk(statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.If) and "MODE" in (test := ast.unparse(statement.test)):
                taken = eval(test, {"MODE": mode, "QKV": "QKV", "PLAIN": "PLAIN", "GATE_UP": "GATE_UP"})
                walk(statement.body if taken else statement.orelse)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                name = ast.unparse(statement.value.func)
                found.extend([name] * (name in ("begin", "wait_for_inputs")))

    walk(function.body)
    return found


@pytest.mark.parametrize("module, name", [(m, name) for m, names in WRITERS.items() for name in names])
def test_the_attention_may_read_what_is_older_than_its_queries(module, name):
    kernel = getattr(importlib.import_module(f"stages.part4_worker.kernels.triton.{module}"), name)
    assert calls(kernel, "QKV") == ["wait_for_inputs", "begin"]
    if module == "fused_linear_kernels":
        assert calls(kernel, "PLAIN") == calls(kernel, "GATE_UP") == ["begin", "wait_for_inputs"]
