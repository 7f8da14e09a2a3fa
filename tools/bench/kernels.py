"""Which way of running a layer's matrix products is fastest at how many rows: the evidence behind `PLANS`.

Runs the four linear operations of every layer of the embedded model, with weights of its shapes, as one CUDA
graph: once with norms, the library's products and the rest one after the other, and once with each candidate
plan of the fused kernels. Attention is left out, and then measured in its turn: attention_programs.py.
`python -m tools.bench.kernels OUT.json [ROWS,…]` on a GPU.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import json_files
from ..provenance import provenance
from .attention_programs import measure_attention
from .floor import Bench
from .kernel_layers import DTYPE, MODEL, STAGE, Layers, microseconds

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


def candidates(fused: Any, rows: int, used: Any) -> list[Any]:
    """Plans worth trying at so many rows: None, which is the library, the one in use, and others."""
    plans: list[Any] = [None, used]
    if rows <= 8:
        block_m = 1 << (rows - 1).bit_length()
        plans += [fused.Plan("few_rows", block_m, block_n, 1) for block_n in (1, 2)]
    if 1 < rows <= 64:
        for block_m, block_n, warps in itertools.product((8, 16) if rows > 8 else (8,), (16, 32), (4, 8)):
            plans.append(fused.Plan("sliced", block_m, block_n, warps, 128))
    if rows > 4:
        heights = [16] if rows <= 16 else [16, 32, 64] if rows <= 64 else [32, 64]
        for block_m, block_n, (block_k, stages) in itertools.product(
            heights, (16, 32, 64), ((64, 8), (128, 5), (128, 8))
        ):
            if stages * block_k * (block_m + 2 * block_n) * 2 < 200_000:
                plans.append(fused.Plan("tiles", block_m, block_n, 4, block_k, stages))
    return list(dict.fromkeys(plans))


def measure(rows_list: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A result for each row count: the library's time, the plan in use, and every plan's time, best first."""
    fused = importlib.import_module(f"{STAGE}.kernels.triton.fused_linear")
    kernels = importlib.import_module(f"{STAGE}.kernels").load_kernels("triton")
    bench, plan_for = Bench("cuda"), fused.plan_for
    for rows in rows_list:
        layers, used = Layers(kernels, rows, "cuda"), plan_for(rows, DTYPE)
        timed: dict[Any, float] = {}
        for plan in candidates(fused, rows, used):
            fused.plan_for = lambda rows, dtype, plan=plan: plan
            try:
                timed[plan] = microseconds(layers, bench)
            except Exception as error:
                if plan in (None, used):
                    raise
                print(f"{rows} rows, {plan}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            finally:
                fused.plan_for = plan_for
        library = timed.pop(None)
        best = sorted(((time, plan._asdict()) for plan, time in timed.items()), key=lambda pair: pair[0])
        print(
            f"{rows:5d} rows: library {library:6.0f} us",
            *(f"| {t:5.0f} {p}" for t, p in best[:2]),
            flush=True,
        )
        yield {
            "rows": rows,
            "library_us": library,
            "in_use": None if used is None else used._asdict(),
            "plans_us": best,
        }


def main(path: str, rows_list: tuple[int, ...] = ROWS) -> None:
    """Measure, and write `path` after each row count. Times are medians of one pass through all layers."""
    found: dict[str, Any] = {
        "format": "fledge-kernels",
        "version": 1,
        **provenance("cuda"),
        "command": f"python -m tools.bench.kernels OUT.json {','.join(map(str, rows_list))}",
        "model": MODEL,
        "dtype": str(DTYPE).removeprefix("torch."),
        "rows": [],
        "attention": [],
    }
    for part, results in (("rows", measure(rows_list)), ("attention", measure_attention())):
        for result in results:
            found[part].append(result)
            json_files.write(Path(path), found)


if __name__ == "__main__":
    main(sys.argv[1], *(tuple(map(int, rows.split(","))) for rows in sys.argv[2:3]))
