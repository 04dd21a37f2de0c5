"""How torch uses the GPU of a rank: switches for a whole process. Most have no effect without a GPU."""

from __future__ import annotations

import os

import torch

from toolkit.base import logs
from toolkit.config import TrainConfig

#: Variables by which a user configures torch's allocator. The second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

log = logs.get(__name__)


def apply_gpu_settings(config: TrainConfig) -> None:
    """Set torch's switches as the config says. Call it before the model is made.

    ``deterministic`` wins over ``cudnn_benchmark``: cuDNN would choose its algorithms by their time, so other ones
    after a restart. TF32 gives the same bits each time, and stays.
    """
    torch.set_float32_matmul_precision(config.float32_matmul)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
    if not config.expandable_segments or not torch.cuda.is_available():
        return
    # What the user has set of the allocator is left alone.
    if theirs := [name for name in ALLOCATOR_VARIABLES if name in os.environ]:
        log.warning("train.expandable_segments is left to %s, which is set", theirs[0])
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
