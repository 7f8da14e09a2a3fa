"""The doors between host and device: what a step sends and reads back arrives whole, and stays."""

from __future__ import annotations

import numpy as np
import torch

from stages.part4_worker.model_executor.device_io import PackedBuffer, Readback


def test_a_readback_keeps_dtypes_and_shapes_wherever_they_fall_in_the_buffer():
    """Three bytes of bool put everything behind them out of line."""
    sent = (torch.tensor([True, False, True]), torch.arange(6).view(2, 3), torch.rand(4), torch.empty(0, 2))
    readback = Readback()
    readback.copy(*sent)
    for have, want in zip(readback.wait(), sent, strict=True):
        assert have.dtype == want.numpy().dtype and np.array_equal(have, want.numpy())


def test_what_was_read_survives_the_next_copy():
    """One Readback serves every step, and a step's result is looked at after the next is launched."""
    readback = Readback()
    readback.copy(torch.tensor([1, 2]))
    (first,) = readback.wait()
    readback.copy(torch.tensor([3, 4]))
    assert first.tolist() == [1, 2] and readback.wait()[0].tolist() == [3, 4]


def test_a_readback_follows_a_change_of_dtype_that_leaves_the_size():
    readback = Readback()
    readback.copy(torch.tensor([1, 2]))
    readback.copy(torch.tensor([1.5, 2.5, 3.5, 4.5]))
    assert readback.wait()[0].tolist() == [1.5, 2.5, 3.5, 4.5]


def test_rows_of_an_earlier_larger_batch_are_cleared():
    buffer = PackedBuffer(torch.device("cpu"), [(3,), (3, 2)])
    buffer.fill(np.array([1, 2, 3]), np.ones((3, 2)))
    buffer.fill(np.array([7]), np.full((1, 2), 8))
    buffer.send()
    assert [part.tolist() for part in buffer.device] == [[7, 0, 0], [[8, 8], [0, 0], [0, 0]]]
