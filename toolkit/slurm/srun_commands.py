"""The command lines of srun."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SrunStep:
    """One srun step: what runs where. ``hosts`` has one entry per rank, in rank order."""

    command: Sequence[str]
    hosts: Sequence[str]
    cpus_per_task: int | None  #: None: all CPUs of the job on each node, as a step next to others may have
    output: str | None  #: srun's file name pattern, such as ``logs/rank-%t.log``; None: srun's own stdout
    name: str | None = None  #: the name by which `SlurmCommands.find_step` finds the step
    mpi: str | None = None
    gres: str | None = None  #: of each node, such as ``gpu:4``; None: what Slurm derives from the job's request
    overlap: bool = False  #: next to running ranks; without it such a step waits for ever
    extra: Sequence[str] = ()


def srun_argv(step: SrunStep) -> list[str]:
    """Return the command line of ``step``. Its SLURM_HOSTFILE must hold ``step.hosts``, one per line.

    srun itself kills nothing (``--kill-on-bad-exit=0 --wait=0``): otherwise the first rank to stop cleanly would end
    the others. Ranks always get ``--cpus-per-task``: 22.05 to 23.11 do not inherit it. Never ``--nodes``: the host file
    names the nodes, and 24.11 refuses both together.
    """
    return [
        "srun",
        f"--ntasks={len(step.hosts)}",
        *([] if step.cpus_per_task is None else [f"--cpus-per-task={step.cpus_per_task}"]),
        # The ranks' nodes are those of the host file, line by line.
        "--distribution=arbitrary",
        "--kill-on-bad-exit=0",
        "--wait=0",
        *([] if step.output is None else [f"--output={step.output}", "--open-mode=append"]),
        "--export=ALL",
        *([f"--job-name={step.name}"] if step.name else []),
        *([f"--mpi={step.mpi}"] if step.mpi else []),
        *([f"--gres={step.gres}"] if step.gres else []),
        *(["--overlap"] if step.overlap else []),
        *step.extra,
        *step.command,
    ]


#: Slurm's names of the limits that bash's ulimit sets, by its options. Without any it sets that of files' sizes.
_LIMITS = {
    "c": "CORE",
    "d": "DATA",
    "f": "FSIZE",
    "l": "MEMLOCK",
    "m": "RSS",
    "n": "NOFILE",
    "s": "STACK",
    "t": "CPU",
    "u": "NPROC",
    "v": "AS",
}


def limit_options(setup: Sequence[str]) -> list[str]:
    """Return srun's option by which tasks have the limits that the shell lines ``setup`` set with ulimit.

    Many sites give a step the limits of the node's own daemon (``PropagateResourceLimits=NONE``).
    """
    words = [options.split() for line in setup for options in re.findall(r"\bulimit\b([^;&|#]*)", line)]
    letters = [letter for each in words for letter in "".join(word for word in each if word[0] == "-") or "f"]
    names = dict.fromkeys(_LIMITS[letter] for letter in letters if letter in _LIMITS)
    return [f"--propagate={','.join(names)}"] if names else []


def srun_here_argv(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` once on this node of the job, next to all else, without GPUs.

    ``command`` may begin with srun's options.
    """
    here = f"--nodelist={os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
    options = ["--nodes=1", "--ntasks=1", here, "--gres=none", "--overlap", "--unbuffered", "--export=ALL"]
    return ["srun", *options, *command]


def srun_nodes_argv(command: Sequence[str], nodes: int, options: Sequence[str]) -> list[str]:
    """Return the command line that asks Slurm for ``nodes`` nodes and runs ``command`` once on each."""
    size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", *size, "--kill-on-bad-exit=0", "--wait=0", "--label", *options, *command]


def salloc_argv(options: Sequence[str], command: Sequence[str], *, is_terminal: bool) -> list[str]:
    """Return the command line that asks Slurm for nodes and runs ``command`` on the first one.

    It is the job's interactive step: srun inside it starts tasks on all nodes of the job.
    """
    pty = ["--pty"] if is_terminal else []
    return ["salloc", *options, "srun", "--interactive", "--preserve-env", *pty, *command]
