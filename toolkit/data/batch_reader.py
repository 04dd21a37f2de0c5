"""Loading a whole part at once, from a data set that gives batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from toolkit.base.errors import JobFailedError
from toolkit.data.sampler import BatchPart
from toolkit.data.workers import NO_SAMPLE, SampleReader
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
