"""Measures the GPUs of this node: ``python -m toolkit.plugins.site.gpu_measure LIMIT_S``.

The agent starts it before the first ranks. It is killed after ``LIMIT_S`` seconds.

All GPUs work at once, as they will for the ranks: matrix products for some seconds, then copies from the host. It
prints a line of JSON, ``{"gemm": [...], "copy": [...]}``, with each GPU's operations and bytes a second.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

if __name__ == "__main__":
    # Before torch: also its import may take too long. The ranks start after the limit, and a CUDA context next to them
    # would take their memory or, in exclusive mode, the device. Python does not handle the signal, so the kernel ends
    # the process whatever it does.
    signal.alarm(int(sys.argv[1]))

import torch

from toolkit.devices import accelerator

GEMM_S, COPY_S = 4.0, 1.0
#: Edge of the matrices, and bytes of a copy.
EDGE, COPY_BYTES = 8192, 256 << 20


def measure(
    devices: Sequence[torch.device], edge: int, copy_bytes: int, gemm_s: float, copy_s: float
) -> dict[str, list[float]]:
    """Return the figures of each device."""
    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        products = pool.map(partial(_gemm, edge=edge, for_s=gemm_s), devices)
        gemm = [2 * edge**3 * rate for rate in products]
        copies = pool.map(partial(_copy, size_bytes=copy_bytes, for_s=copy_s), devices)
        return {"gemm": gemm, "copy": [copy_bytes * rate for rate in copies]}


def _gemm(device: torch.device, edge: int, for_s: float) -> float:
    matrix = torch.ones(edge, edge, dtype=torch.bfloat16, device=device)
    result = torch.empty_like(matrix)
    return rate(lambda: torch.mm(matrix, matrix, out=result), device, for_s)


def _copy(device: torch.device, size_bytes: int, for_s: float) -> float:
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    target = torch.empty_like(host, device=device)
    return rate(lambda: target.copy_(host, non_blocking=True), device, for_s)


def rate(work: Callable[[], object], device: torch.device, for_s: float) -> float:
    """Return how often a second ``device`` does ``work``. The first time, which may load kernels, does not count."""
    wait: Callable[[], object] = int if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    work()
    wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < for_s:
        work()
        wait()
        count += 1
    return count / (time.perf_counter() - began)


def main() -> None:
    """Measure all GPUs that this process sees."""
    devices = [torch.device(accelerator.kind().type, index) for index in range(accelerator.count())]
    print(json.dumps(measure(devices, EDGE, COPY_BYTES, GEMM_S, COPY_S)), flush=True)


if __name__ == "__main__":
    main()
