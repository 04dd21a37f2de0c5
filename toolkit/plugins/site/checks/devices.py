"""Checks whether the GPUs are there and empty, and which InfiniBand ports are up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from toolkit.devices import on_node
from toolkit.devices.kinds import GPUS, PART, visible_words
from toolkit.devices.watched import Gpus, GpusError
from toolkit.plugins.node_watch.drivers import open_gpus
from toolkit.plugins.site import fabric
from toolkit.plugins.site.checks import Finding, ok
from toolkit.slurm.network import SYSFS

#: Shares of a GPU's memory. The driver itself takes some hundred MiB; more than these shares belongs to a process.
LEFTOVER_WARNING, LEFTOVER_BAD = 0.02, 0.10

Opener = Callable[[Mapping[str, str]], Gpus | None]


def check_gpus(
    asked: int, environ: Mapping[str, str], open_gpus: Opener = open_gpus, root: Path = Path("/")
) -> list[Finding]:
    """Compare the visible GPUs with those asked for. Report what others have left in their memory."""
    if asked == 0:
        return []
    try:
        gpus = open_gpus(environ)
    except GpusError as error:
        return [Finding("gpus", "bad", f"0 of {asked}", f"{error}; the driver is not well: have the node drained")]
    named = _named(environ)
    # A part of a GPU counts as one. The memory of its GPU is used by other jobs, too.
    if any(word.startswith(PART) for word in named or ()):
        return [_count(asked, len(named or ()), environ)]
    if gpus is None:
        there = on_node.device_files(root)
        return [_count(asked, there if named is None else min(there, len(named)), environ)]
    counted = _count(asked, sum(gpu.devices for gpu in gpus.gpus), environ)
    return [replace(counted, text=counted.text or gpus.cannot_tell), _leftovers(gpus)]


def _named(environ: Mapping[str, str]) -> list[str] | None:
    """Return the devices that variables name for this process, of whichever maker; None if none is set."""
    levels = [level for kind in GPUS for level in visible_words(kind, environ)]
    return min((words for _, words in levels), key=len, default=None)


def _count(asked: int, there: int, environ: Mapping[str, str]) -> Finding:
    if there >= asked:
        return ok("gpus", str(there))
    text = (
        f"only {there} of the {asked} GPUs asked for are visible: {on_node.described(environ)}; `dmesg` on the node "
        "tells more; have it drained"
    )
    return Finding("gpus", "bad", f"{there} of {asked}", text)


def _leftovers(gpus: Gpus) -> Finding:
    """Return a finding on memory that is in use, with the processes that the driver names."""
    loads = {gpu.index: (gpu, gpus.load(gpu)) for gpu in gpus.gpus}
    used = {
        index: (load.memory_bytes or 0, (load.memory_bytes or 0) / load.total_memory_bytes)
        for index, (_, load) in loads.items()
        if load.total_memory_bytes
    }
    worst = max((share for _, share in used.values()), default=0.0)
    if worst < LEFTOVER_WARNING:
        return ok("gpu memory", f"{worst:.0%}")
    occupied = {index: size for index, (size, share) in used.items() if share >= LEFTOVER_WARNING}
    pids = [pid for index in occupied for pid in gpus.processes(loads[index][0])]
    named = "".join(f"; pid {pid} {_command(pid)}" for pid in pids[:3])
    words = ", ".join(f"GPU {index}: {size / 2**30:.1f} GiB" for index, size in occupied.items())
    text = f"GPU memory is in use already ({words}{named}): end what uses it, or have the node drained"
    return Finding("gpu memory", "bad" if worst >= LEFTOVER_BAD else "warning", f"{worst:.0%}", text)


def _command(pid: int) -> str:
    """Return the first words of a process's command; empty where it is hidden from us."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60].strip()
    return ""


def check_infiniband(sysfs: Path = SYSFS) -> list[Finding]:
    """Return the ACTIVE ports. Nodes are compared by their number, which a port that is down changes."""
    if not (sysfs / "class/infiniband").is_dir():
        return []
    ports = fabric.infiniband_ports(sysfs)
    figure = ",".join(f"{port.device}:{port.port}" for port in ports) or "none active"
    return [ok("infiniband", figure, float(len(ports)))]
