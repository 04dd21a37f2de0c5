"""Random numbers as a function of (seed, step, share).

A resume needs no saved random state. Before each step the process's generators are seeded anew. So the dropout mask of
step 1000 is the same whether the run came there in one attempt or in five, and whatever was drawn in between for
logging or evaluation. Beside it: torch's other switches for a whole process, most of them for its GPU.
"""

from __future__ import annotations

import os

import torch

from toolkit.base import logs
from toolkit.config import TrainConfig
from toolkit.data import randomness
from toolkit.data.permutation import hash64
from toolkit.data.randomness import seed_cpu
from toolkit.devices import accelerator
from toolkit.devices.kinds import CPU

#: Tags that keep these seeds apart from those that other parts of the package hash from the same run seed.
_STEP = 0x53544550
_MODEL = 0x4D4F4445


def prepare(seed: int, *, deterministic: bool = False) -> None:
    """Seed the generators before the model is made. Every rank then draws the same first weights.

    ``deterministic`` allows only algorithms that give the same bits every time. An operation without one raises, and
    names itself.
    """
    randomness.HELD.clear()
    _seed_generators(hash64(_MODEL, seed))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, step: int, share: int) -> None:
    """Seed the generators before a step. No two shares of a step, and no two steps, draw the same dropout masks."""
    _seed_generators(hash64(_STEP, seed, step, share))


def _seed_generators(word: int) -> None:
    """Seed torch's generators for the CPU and every GPU, ``random``, numpy's legacy one, and those that the job holds.

    This takes about 7 us on the CPU; ``torch.manual_seed`` would take 100 us.
    """
    seed_cpu(word)
    accelerator.seed(word >> 1)
    for number, (generator, origin) in enumerate(randomness.HELD.items()):
        randomness.seed_generator(generator, hash64(word, origin, number))


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
    if not config.expandable_segments or accelerator.kind() is CPU:
        return
    # What the user has set of the allocator is left alone.
    if theirs := [name for name in ALLOCATOR_VARIABLES if name in os.environ]:
        log.warning("train.expandable_segments is left to %s, which is set", theirs[0])
        return
    accelerator.set_allocator("expandable_segments:True")
