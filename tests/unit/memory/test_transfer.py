"""Tensors between host and device: the copy equals the original, is one copy, and nothing waits before the end."""

import torch

from hybrid_rl.memory.transfer import ALIGNMENT, finish_downloads, start_download, upload
from tests.support.cuda.pretended_cuda import CUDA, pretended_cuda

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
COLUMNS = [
    torch.tensor([True, False, True]),
    torch.arange(5),
    torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).t(),
    torch.zeros(0, dtype=torch.int32),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
]


def test_on_the_cpu_nothing_is_copied():
    assert all(there is here for there, here in zip(upload(COLUMNS, CPU), COLUMNS, strict=True))
    column = torch.ones(3, requires_grad=True)
    host = start_download(column)
    assert host.data_ptr() == column.data_ptr() and not host.requires_grad
    finish_downloads(CPU)


def test_an_upload_keeps_values_shapes_and_dtypes(monkeypatch):
    """What would go to a device is looked at on the way."""
    packed = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: packed.append(tensor) or tensor)
    there = upload(COLUMNS, ELSEWHERE)
    assert len(packed) == 1 and len(packed[0]) % ALIGNMENT == 0
    for mine, theirs in zip(COLUMNS, there, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs) and theirs.is_contiguous()
        assert not theirs.numel() or (theirs.data_ptr() - packed[0].data_ptr()) % ALIGNMENT == 0


def test_many_tensors_go_in_one_pinned_copy_and_come_back_with_one_wait():
    with pretended_cuda() as cuda:
        there = upload(COLUMNS, CUDA)
        assert {tensor.device for tensor in there} == {CUDA}
        assert sum(cuda.uploads.values()) == 1 and not cuda.pageable
        found = [start_download(tensor) for tensor in there]
        assert not cuda.reads
        finish_downloads(CUDA)
        assert sum(cuda.reads.values()) == 1
    for mine, theirs in zip(COLUMNS, found, strict=True):
        assert theirs.device == CPU and (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape)
