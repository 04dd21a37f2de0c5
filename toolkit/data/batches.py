"""Batches: loaded as a whole from a data set that gives them, and copied to a rank's device.

On a GPU the copies run on a stream of their own, while the GPU computes the step before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import JobFailedError
from toolkit.data.sampler import BatchPart
from toolkit.data.workers import NO_SAMPLE, SampleReader
from toolkit.devices.accelerator import module_of, with_streams
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch


class BatchReader(SampleReader):
    """A reader of whole parts from a data set that gives batches.

    If a part cannot be loaded and ``skips`` is set, it loads the part sample by sample.
    """

    def load(self, part: BatchPart) -> Batch:
        indices = part.indices if part.indices.size else np.zeros(1, np.int64)  # a batch's shape, without samples
        self.current[:] = [int(indices[0]), part.start]
        self.ahead(part)
        try:
            data = self.dataset.batch(indices)  # type: ignore[attr-defined]
        except JobFailedError:
            raise
        except Exception as error:
            if self.skips and hasattr(self.dataset, "__getitem__"):
                return super().load(part)
            raise JobFailedError(
                f"the samples from position {part.start} on cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self.current[:] = [NO_SAMPLE, NO_SAMPLE]
        batch = Batch(data, torch.from_numpy(part.positions()), part.global_count)
        return batch if part.indices.size else replace(batch, data=nested.rows(data, 1, slice(0)))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` on ``device``, for use on the stream that is current now. The host does not wait for a GPU.

    Tensors come from page-locked memory, and are copied there first where they do not: from other memory the host would
    wait for the copy.
    """
    # What is read or made on the host is there already. To look at each tensor costs more than to fetch a small batch.
    if device.type == "cpu":
        return batch
    module = with_streams(device)
    if module is None:
        return batch.to(device)
    copies, computes = _copy_stream(device), module.current_stream(device)

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.pin_memory().to(device, non_blocking=True)
        # The memory belongs to the stream of the copies. Without this it would be overwritten as soon as Python lets
        # go of the tensor, also when the step that reads it is still to be computed.
        moved.record_stream(computes)
        return moved

    with module.stream(copies):
        batch = batch.map(move)
    # Only what is enqueued from here on waits. The step before, of which the host is ahead, is not held up.
    computes.wait_stream(copies)
    return batch


@cache
def _copy_stream(device: torch.device) -> Any:
    """Return the one stream for copies. The allocator keeps memory for each stream, and does not share it."""
    return module_of(device).Stream(device)
