"""The look-out for waits sees every way in which a host can wait, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.no_sync import HostSyncError, no_sync

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.arange(6.0, device=DEVICE)
MASK, WHOLE = X > 2, X.long()
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "int": lambda: int(X[0]),
    "bool": lambda: 1 if X.sum() > 0 else 2,
    "range": lambda: range(WHOLE[1]),
    "an index": lambda: X[WHOLE[0]],
    "mask": lambda: X[MASK],
    "write by mask": lambda: X.clone().__setitem__(MASK, X[:3]),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "bincount": lambda: torch.bincount(WHOLE),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "repeat_interleave": lambda: X.repeat_interleave(WHOLE),
    "values of the host": lambda: torch.tensor([1, 2], device=DEVICE),
}
if DEVICE == "cpu":
    WAITS["numpy"] = lambda: X.numpy()


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name: str) -> None:
    WAITS[name]()
    with pytest.raises((HostSyncError, RuntimeError), match="expected no wait|synchronizing"), no_sync():
        WAITS[name]()


def test_what_stays_on_the_device_is_let_through() -> None:
    with no_sync():
        order = X.sort(stable=True, descending=True).indices
        torch.searchsorted(X, torch.arange(3, device=DEVICE).float(), out_int32=True)
        y = torch.where(MASK, X, 0.0)[order].masked_fill(MASK, 1.0).topk(2).values
        y = torch.cat((y, X.repeat_interleave(2)))
        X.clone().index_copy_(0, order, X)[1:].copy_(WHOLE[1:])
    assert y.shape == (14,)
    assert X.sum().item() == 15, "and outside everything is allowed again"
