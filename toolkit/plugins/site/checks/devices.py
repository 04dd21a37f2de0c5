"""Checks whether the GPUs are there and empty, and which InfiniBand ports are up."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base.node_programs import Ask, ask_smi
from toolkit.plugins.site.checks import Finding, ok
from toolkit.slurm import network

#: Shares of a GPU's memory. The driver itself takes some hundred MiB; more than these shares belongs to a process.
LEFTOVER_WARNING, LEFTOVER_BAD = 0.02, 0.10
#: Device files of GPUs, counted where there is no nvidia-smi.
DEVICES = ("nvidia[0-9]*", "dri/renderD*")


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use; memory in MiB."""

    index: str
    uuid: str
    used: float
    total: float


def check_gpus(asked: int, environ: Mapping[str, str], ask: Ask = ask_smi, dev: Path = Path("/dev")) -> list[Finding]:
    """Compare the visible GPUs with those asked for. Report what others have left in their memory."""
    if asked == 0:
        return []
    try:
        answer = ask(["--query-gpu=index,uuid,memory.used,memory.total"])
    except (OSError, subprocess.SubprocessError) as error:
        text = f"{error}; the driver is not well: have the node drained"
        return [Finding("gpus", "bad", f"0 of {asked}", text)]
    named = environ.get("CUDA_VISIBLE_DEVICES")
    words = None if named is None else [word.strip() for word in named.split(",") if word.strip()]
    # Without nvidia-smi the device files are counted.
    if answer is None:
        files = max(len(list(dev.glob(pattern))) for pattern in DEVICES)
        return [_count(asked, files if words is None else min(files, len(words)))]
    visible: list[Gpu] = []
    for line in answer.splitlines():
        index, uuid, used, total = (word.strip() for word in line.split(","))
        # The variable names GPUs by index, or by the beginning of their UUID.
        if words is None or index in words or any(uuid.startswith(word) for word in words):
            visible.append(Gpu(index, uuid, _number(used), _number(total)))
    # A part of a GPU (MIG) counts as one. The memory of its GPU is used by other jobs, too.
    parts = sum(word.startswith("MIG-") for word in words or ())
    return [_count(asked, len(visible) + parts), _leftovers(visible, ask)]


def _count(asked: int, there: int) -> Finding:
    if there >= asked:
        return ok("gpus", str(there))
    text = (
        f"only {there} of the {asked} GPUs asked for are visible: `nvidia-smi -L` and `dmesg | grep -i xid` on the "
        "node tell more; have it drained"
    )
    return Finding("gpus", "bad", f"{there} of {asked}", text)


def _number(text: str) -> float:
    """Return the number. ``[N/A]`` is 0: nvidia-smi prints it for a GPU without memory of its own."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def _leftovers(gpus: Sequence[Gpu], ask: Ask) -> Finding:
    """Return a finding on memory that is in use, with the processes that nvidia-smi names."""
    shares = {gpu: gpu.used / gpu.total for gpu in gpus if gpu.total}
    worst = max(shares.values(), default=0.0)
    if worst < LEFTOVER_WARNING:
        return ok("gpu memory", f"{worst:.0%}")
    try:
        users = ask(["--query-compute-apps=pid,process_name"]) or ""
    except (OSError, subprocess.SubprocessError):
        users = ""
    named = "".join(f"; pid {line.replace(',', '')}" for line in users.splitlines()[:3])
    occupied = [gpu for gpu, share in shares.items() if share >= LEFTOVER_WARNING]
    used = ", ".join(f"GPU {gpu.index}: {gpu.used / 1024:.1f} GiB" for gpu in occupied)
    text = f"GPU memory is in use already ({used}{named}): end what uses it, or have the node drained"
    return Finding("gpu memory", "bad" if worst >= LEFTOVER_BAD else "warning", f"{worst:.0%}", text)


def check_infiniband(sysfs: Path = network.SYSFS) -> list[Finding]:
    """Return the ACTIVE ports. Nodes are compared by their number, which a port that is down changes."""
    if not (sysfs / "class/infiniband").is_dir():
        return []
    ports = network.infiniband_ports(sysfs)
    figure = ",".join(f"{port.device}:{port.port}" for port in ports) or "none active"
    return [ok("infiniband", figure, float(len(ports)))]
