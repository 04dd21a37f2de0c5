"""Prints the CPUs near each GPU.

The node's agent starts it as ``python -I -S gpus.py``. It imports nothing of ours. It is a separate process because
NVIDIA's drivers before 590 wake a GPU up before they tell which one it is. For a lost GPU they may wait for ever, and
the agent must not wait.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")


def near_cpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[list[int]]:
    """Return the CPUs of each visible GPU's NUMA node, ordered by CUDA's device numbers.

    ``root`` is the folder in which ``dev``, ``proc`` and ``sys`` lie. Raises OSError, LookupError or ValueError where
    the order or a NUMA node is not certain: MIG ids, unequal GPUs in the order of their speed, NUMA node -1. From
    CUDA's programming guide (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``) and Linux, ABI/testing/sysfs-bus-pci.
    """
    gpus: list[dict[str, str]] = []
    for folder in sorted((root / DRIVER.relative_to("/")).iterdir()):  # named by PCI addresses
        fields = {}
        for line in (folder / "information").read_text().splitlines():
            key, _, value = line.partition(":")
            fields[key] = value.strip()
        # access(2) does not open the device. It asks the device cgroup, which Slurm's ConstrainDevices sets.
        if os.access(root / f"dev/nvidia{fields['Device Minor']}", os.R_OK | os.W_OK):
            gpus.append({**fields, "address": folder.name, "index": str(len(gpus))})
    # CUDA's default order is by speed, which is certain only for equal GPUs.
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu["Model"] for gpu in gpus}) > 1:
        raise ValueError("CUDA numbers unequal GPUs by their speed")
    near = []
    all_gpus = ",".join(gpu["index"] for gpu in gpus)
    for word in environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(","):
        if word.startswith("GPU-"):  # CUDA also accepts the beginning of a UUID
            [gpu] = [gpu for gpu in gpus if gpu["GPU UUID"].startswith(word)]
        else:
            [gpu] = [gpu for gpu in gpus if gpu["index"] == word]
        node = int((root / f"sys/bus/pci/devices/{gpu['address']}/numa_node").read_text())
        near.append(parse((root / f"sys/devices/system/node/node{node}/cpulist").read_text()))
    return near


def parse(cpulist: str) -> list[int]:
    """Return the CPUs of a list in Linux's format: ``0-3,8``. Raises ValueError, also for an empty one."""
    ends = [[int(end) for end in part.split("-")] for part in cpulist.split(",")]
    return [cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)]


if __name__ == "__main__":
    with contextlib.suppress(OSError, LookupError, ValueError):
        print(json.dumps(near_cpus(os.environ)))
