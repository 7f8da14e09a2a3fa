"""What the host knows about one attention step: lengths as Python lists, and what is planned from them once.

A model with thirty layers calls the attention kernel thirty times with the same lengths. The native twin
loops over requests, so it needs those lengths as numbers and the slot lists as index tensors; both are made
at the first layer and kept here. The Triton twin plans nothing and ignores the object.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class HostMetadata:
    """Host copies of an attention call's lengths.

    Make a new object whenever lengths, request table, tree mask or the shape of the pool change: the plan
    made at the first call is reused by every later call that gets the same object.

    Args:
        kv_lens: [bs] tokens of each request that may be read.
        prefix_lens: [bs] position of each request's first query row.
        q_start_loc: [bs + 1] first row of each request, and the number of rows.
    """

    kv_lens: list[int]
    prefix_lens: list[int]
    q_start_loc: list[int]
    plan: object | None = field(default=None, repr=False)
