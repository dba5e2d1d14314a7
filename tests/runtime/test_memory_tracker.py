"""The tracker counts what is alive: checked by hand for a few lines, forward and backward."""

from __future__ import annotations

import torch

from autopar.runtime.memory_tracker import MemoryTracker

KIB = torch.zeros(16, 16)  # float32


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    with MemoryTracker([KIB]) as live:
        a = KIB + 1  # 2
        b = a.t()  # a view
        a = b * 2  # 3, then the sum is only held by its view
        del b  # 2
        a = a.exp()  # 3, then 2
    assert live.peak().bytes == 3 * KIB.nbytes
    assert live.peak().made == "aten.mul.Tensor"
    del a


def test_what_autograd_keeps_stays_until_its_backward() -> None:
    x = KIB.clone().requires_grad_()
    with MemoryTracker([x]) as live:
        y = x.exp().exp().exp()  # three results are kept
        torch.autograd.backward(y, KIB)
    peak = live.peak()
    assert peak.bytes == (1 + 3 + 1 + 2) * KIB.nbytes  # x, results, the gradient given, and in the second backward two more
    assert peak.made == "ExpBackward0: aten.mul.Tensor"
    assert {alike.made: count for alike, count, _ in peak.alive}["aten.exp.default"] == 3


def test_memory_used_before_does_not_count() -> None:
    other = KIB.clone()
    with MemoryTracker([]) as live:
        torch.ones(4)
    assert live.peak().bytes == 16
    del other


def test_bytes_are_counted_on_meta_too() -> None:
    with MemoryTracker([], "meta") as live:
        torch.zeros(1024, device="meta") + 1
        torch.zeros(4096)
    assert live.peak().bytes == 8192
