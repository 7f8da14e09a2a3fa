"""Which slots of a verified tree go back to the pool where freeing one slot of a page frees all of it."""

from __future__ import annotations

import numpy as np
import pytest

from stages.part4_worker.speculative.eagle_info import align_evict_mask_to_page_size


@pytest.mark.parametrize(
    "seq_len, page, nodes, kept, freed",
    [
        (10, 4, 6, 2, [2, 3, 4, 5]),  # the last kept token stands at 11, the end of its page
        (10, 4, 6, 3, []),  # at 12, and no rejected one beyond its page
        (9, 4, 8, 2, [3, 4, 5, 6, 7]),
        (9, 4, 8, 8, []),
        (8, 4, 4, 1, []),
        (10, 1, 6, 2, [2, 3, 4, 5]),
    ],
)
def test_the_page_of_the_last_kept_token_stays(seq_len, page, nodes, kept, freed):
    """Columns of the step whose slots are freed: none that shares its page with a kept token."""
    evict_mask = np.arange(nodes)[None] >= kept
    aligned = align_evict_mask_to_page_size(np.array([seq_len]), np.array([kept]), evict_mask, page)
    assert np.flatnonzero(aligned[0]).tolist() == freed
