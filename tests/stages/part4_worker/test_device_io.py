"""The doors between host and device: what goes in comes out, in one transfer, and nothing moves later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.part4_worker.kernels.packed import empty_side_by_side
from stages.part4_worker.model_executor import device_io
from stages.part4_worker.model_executor.device_io import Readback, download, upload
from stages.part4_worker.model_executor.packed_buffer import PackedBuffer

CPU = torch.device("cpu")


@pytest.fixture
def counted():
    """counted(): uploads and downloads since the last call."""
    seen = dict(device_io.counts)

    def since():
        new = {name: device_io.counts[name] - seen[name] for name in seen}
        seen.update(device_io.counts)
        return new["uploads"], new["downloads"]

    return since


def random_arrays(*shapes):
    generator = np.random.default_rng(0)
    return [generator.integers(-(2**62), 2**62, shape) for shape in shapes]


SHAPES = [(3,), (1,), (0,), (2, 3), (5, 0), (1, 1), (4,)]


# ---- upload ----


def test_uploaded_arrays_come_out_as_they_went_in(counted):
    arrays = random_arrays(*SHAPES)
    tensors = upload(CPU, *arrays)
    assert counted() == (1, 0)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
        assert np.array_equal(tensor.numpy(), array) and tensor.shape == array.shape


def test_other_integers_and_strided_arrays_become_int64():
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    first, second = upload(CPU, wide[::2, 1:4], [True, False])
    assert first.tolist() == [[1, 2, 3], [13, 14, 15]] and second.tolist() == [1, 0]
    assert first.dtype == second.dtype == torch.int64


def test_later_changes_of_an_array_do_not_reach_the_device():
    array = np.arange(4)
    (tensor,) = upload(CPU, array)
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3]


def aligned(tensors):
    """Triton compiles a kernel once more for every pattern of pointers that are no multiple of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.numel())


def test_every_array_starts_at_a_multiple_of_16_bytes():
    assert aligned(upload(CPU, *random_arrays(*SHAPES)))
    assert aligned(PackedBuffer(CPU, SHAPES).device)


# ---- readback ----


def mixed():
    """Tensors of every dtype that a step reads, of odd sizes, one of them strided."""
    return [
        torch.tensor([True, False, True]),
        torch.arange(12, dtype=torch.int64).view(3, 4)[:, ::2],
        torch.randn(5),
        torch.zeros(0, 2),
        torch.tensor([[7]], dtype=torch.int32),
    ]


def test_a_download_is_one_copy_of_everything(counted):
    tensors = mixed()
    arrays = download(*tensors)
    assert counted() == (0, 1)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert array.dtype == tensor.numpy().dtype and np.array_equal(array, tensor.numpy())


def test_what_was_read_stays_when_the_object_reads_again():
    readback, tensor = Readback(), torch.arange(3)
    readback.copy(tensor)
    (first,) = readback.wait()
    tensor += 10
    readback.copy(tensor)
    (second,) = readback.wait()
    assert first.tolist() == [0, 1, 2] and second.tolist() == [10, 11, 12]


def test_what_changes_after_the_copy_is_not_seen():
    """The host reads a step's results as they were, whatever the device does next."""
    readback, tensor = Readback(), torch.arange(3)
    readback.copy(tensor)
    tensor.zero_()
    assert readback.wait()[0].tolist() == [0, 1, 2]


def test_the_same_memory_is_used_again_for_the_same_shapes():
    """A recorded copy writes to an address; another shape takes another."""
    readback = Readback()
    readback.copy(torch.arange(3), torch.zeros(2))
    place = readback._host.data_ptr()
    readback.copy(torch.arange(3) + 5, torch.ones(2))
    assert readback._host.data_ptr() == place
    assert [a.tolist() for a in readback.wait()] == [[5, 6, 7], [1, 1]]
    readback.copy(torch.arange(9))
    assert readback.wait()[0].tolist() == list(range(9))


def test_another_dtype_of_as_many_bytes_is_another_shape():
    readback = Readback()
    readback.copy(torch.tensor([1, 2]))
    readback.copy(torch.tensor([1.5, 2.5, 3.5, 4.5]))
    assert readback.wait()[0].tolist() == [1.5, 2.5, 3.5, 4.5]


def no_cat(monkeypatch):
    def cat(*args, **kwargs):
        raise AssertionError("gathered, though it lies side by side")

    monkeypatch.setattr(torch, "cat", cat)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), slice(1, None), slice(1, 2)])
def test_what_lies_side_by_side_is_not_gathered(monkeypatch, order):
    """In any order, whole or in part, with the room that alignment leaves between odd sizes."""
    kinds = [((3, 5), torch.int64), ((3,), torch.float32), ((1,), torch.bool), ((3, 1), torch.int64)]
    parts = empty_side_by_side(CPU, *kinds)
    assert all(t.data_ptr() % 16 == 0 for t in parts)
    for t in parts:
        t.copy_(torch.arange(t.numel()).view(t.shape))
    wanted = [t.clone().numpy() for t in parts]
    no_cat(monkeypatch)
    for array, want in zip(download(*parts[order]), wanted[order], strict=True):
        assert array.dtype == want.dtype and np.array_equal(array, want)


@pytest.mark.parametrize("parts", [
    lambda x: (x[:, :2], x[:, 2:]),  # rows with gaps
    lambda x: (x[0], x[-1]),  # far apart
    lambda x: (x[0], torch.ones(2)),  # another piece of memory
])  # fmt: skip
def test_what_does_not_is_gathered(parts):
    tensors = parts(torch.arange(400).view(40, 10))
    for array, tensor in zip(download(*tensors), tensors, strict=True):
        assert np.array_equal(array, tensor.numpy())


def test_only_waiting_counts(counted):
    readback = Readback()
    readback.copy(torch.arange(3))
    assert counted() == (0, 0)
    readback.wait()
    assert counted() == (0, 1)


# ---- static inputs ----


def test_a_buffer_brings_what_fill_wrote_and_zeros_behind_it(counted):
    buffer = PackedBuffer(CPU, [(4,), (4, 3), (3, 0)])
    ones = [np.ones((4,), np.int64), np.ones((4, 3), np.int64), np.ones((3, 0), np.int64)]
    buffer.fill(*ones)
    buffer.send()
    buffer.fill(np.array([7, 8]), np.array([[1, 2, 3], [4, 5, 6]]), np.ones((1, 0)))
    assert buffer.device[0].tolist() == [1] * 4  # until it is sent
    buffer.send()
    assert counted() == (2, 0)
    assert buffer.device[0].tolist() == [7, 8, 0, 0]
    assert buffer.device[1].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    assert buffer.device[2].shape == (3, 0)


def test_addresses_never_change():
    buffer = PackedBuffer(CPU, [(3,), (2, 5)])
    before = [t.data_ptr() for t in buffer.device]
    for count in (2, 0, 1):
        buffer.fill(np.ones(count), np.ones((count, 5)))
        buffer.send()
        assert [t[:count].sum() for t in buffer.device] == [count, 5 * count]
    assert [t.data_ptr() for t in buffer.device] == before


def test_parts_do_not_overlap():
    buffer = PackedBuffer(CPU, SHAPES)
    for number, (host, shape) in enumerate(zip(buffer.host, SHAPES, strict=True)):
        assert host.shape == shape
        host[...] = number
    buffer.send()
    assert all((t == number).all() for number, t in enumerate(buffer.device))


@pytest.mark.parametrize("arrays", [1, 3])
def test_fill_takes_an_array_for_each_place(arrays):
    buffer = PackedBuffer(CPU, [(2,), (2,)])
    with pytest.raises(ValueError):
        buffer.fill(*[np.ones(2)] * arrays)


@pytest.mark.gpu
def test_transfers_on_the_gpu_do_not_wait():
    """Neither an upload nor the start of a read synchronises; the end of a read does, by its event."""
    cuda = torch.device("cuda")
    buffer, readback = PackedBuffer(cuda, [(4,)]), Readback()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (tensor,) = upload(cuda, np.arange(4))
        buffer.fill(np.arange(3))
        buffer.send()
        for _ in range(3):
            readback.copy(tensor * 2, buffer.device[0], tensor > 1)
            doubled, sent, over = readback.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert doubled.tolist() == [0, 2, 4, 6] and sent.tolist() == [0, 1, 2, 0]
    assert over.tolist() == [False, False, True, True]


@pytest.mark.gpu
def test_a_recorded_transfer_is_replayed():
    cuda = torch.device("cuda")
    buffer, readback = PackedBuffer(cuda, [(2,)]), Readback()

    def step():
        buffer.send()
        readback.copy(buffer.device[0] + 1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for start in (10, 20):
        buffer.fill(np.array([start, start + 1]))
        graph.replay()
        readback.launched()
        assert readback.wait()[0].tolist() == [start + 1, start + 2]
