"""Copies of batches to a rank's device.

On a GPU they run on a stream of their own, while the GPU computes the step before.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from toolkit.ranks.batch import Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` on ``device``, for use on the stream that is current now. The host does not wait for a GPU.

    Tensors come from page-locked memory, and are copied there first where they do not: from other memory the host would
    wait for the copy.
    """
    # What is read or made on the host is there already. To look at each tensor costs more than to fetch a small batch.
    if device.type == "cpu":
        return batch
    if device.type != "cuda":
        return batch.to(device)
    copies, computes = _copy_stream(device), torch.cuda.current_stream(device)

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.pin_memory().to(device, non_blocking=True)
        # The memory belongs to the stream of the copies. Without this it would be overwritten as soon as Python lets
        # go of the tensor, also when the step that reads it is still to be computed.
        moved.record_stream(computes)
        return moved

    with torch.cuda.stream(copies):
        batch = batch.map(move)
    # Only what is enqueued from here on waits. The step before, of which the host is ahead, is not held up.
    computes.wait_stream(copies)
    return batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for copies. The allocator keeps memory for each stream, and does not share it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
