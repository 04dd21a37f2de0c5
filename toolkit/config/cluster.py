"""What a job asks Slurm for, and which flags of sbatch ``cluster.extra`` may hold.

These are all but those that the toolkit sets or relies on. sbatch_flags.txt lists all flags and says where they are
from.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from toolkit.base import hostlist
from toolkit.base.durations import parse_slurms
from toolkit.base.errors import ConfigError, RequestError, SlurmError, did_you_mean
from toolkit.constraints import (
    PATH,
    TEXT,
    OneOf,
    Range,
    Text,
    Where,
    fits,
    hints_of,
    is_absolute,
    kind_names,
    kinds_of,
    limits_of,
)
from toolkit.slurm import commands, container

#: Slurm counts nodes, tasks and CPUs of a task in 16 bits.
_SLURMS_MOST = 65_533
_Some: TypeAlias = Annotated[int, Range(1, _SLURMS_MOST)]
_Price: TypeAlias = Annotated[float, Range(0, 1e6)]
_GPU_TYPE = Where(re.compile(r"[\w.+-]+").fullmatch, "{!r} is not a type of a GPU, such as a100")
_MEMORY = Where(lambda size: size == 0 or size >= 0.001, "{!r} is less than a megabyte; 0 is all memory of a node")
_ON_EACH_NODE = Where(is_absolute, "{!r} is relative: give an absolute path on each node")


@dataclass
class PriceConfig:
    """What this site charges; for the table at the end of a run, see docs/efficiency.md."""

    cpu_hour: _Price = 0.0  #: for an hour of one CPU
    gpu_hour: _Price = 0.0  #: for an hour of one GPU
    currency: str | None = None  #: such as EUR, or credits


@dataclass
class ClusterConfig:
    """The size of the job and how to ask Slurm for it; inside an allocation the allocation's own size wins."""

    nodes: _Some = 1  #: nodes of the job
    tasks_per_node: _Some = 1  #: ranks on each of them; one for each GPU where there are GPUs
    tasks_per_gpu: Annotated[int, Range(1, 64)] = 1  #: ranks that share a GPU, for small jobs; over gloo
    cpus_per_task: _Some = 1  #: CPU cores of each rank, for it and its data workers
    gpus_per_node: Annotated[int, Range(0, 1024)] = 0  #: 0: a job on CPUs
    gpu_type: Annotated[str, TEXT, _GPU_TYPE] | None = None  #: the type in a site's --gres, such as a100
    #: memory of a node; null: the site's default; 0: all that the node has
    mem_gb: Annotated[float, Range(0, 2**20), _MEMORY] | None = None
    #: the time limit, in minutes, or as 4h or 1-12:00:00; the run continues in another job when it is over
    time_min: Annotated[int, Range(1, 366 * 24 * 60)] = 30
    partition: str | None = None  #: null: the default of the site, as for account and qos
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  #: features of nodes, as for sbatch --constraint
    exclude: str | None = None  #: nodes that are never used: n[1-4,7], or the path of a file of them
    exclusive: bool = False  #: no other job on the same nodes
    #: more nodes than the ranks need, to replace one that fails
    spare_nodes: Annotated[int, Range(0, _SLURMS_MOST)] = 0
    #: nodes that must share a block of the site's topology, such as an NVLink domain, as for sbatch --segment
    segment: _Some | None = None
    #: a checkpoint is committed at least so long before the time limit; a script under exec may save so long at a stop
    save_before_limit_s: Annotated[int, Range(0, 65_535)] = 120
    preflight: bool = True  #: check the nodes before the ranks start
    #: always, never: copy the Python environment to the nodes' own disks; auto: if that pays
    stage: Annotated[str, OneOf("auto", "always", "never")] = "auto"
    #: the folder for copies on each node; null: a temporary one with room
    stage_dir: Annotated[str, PATH, _ON_EACH_NODE] | None = None
    #: lines for the shell of the job's script, such as module load cuda
    setup: Annotated[list[str], Text(also="\t")] = field(default_factory=list)
    container: str | None = None  #: an image in which the ranks run, see slurm/container.py
    container_mounts: Annotated[list[str], PATH] = field(default_factory=list)  #: more folders that they see
    #: of a heterogeneous job: the keys in which each component differs from these
    components: list[dict[str, Any]] = field(default_factory=list)
    price: PriceConfig = field(default_factory=PriceConfig)  #: what an hour costs
    extra: dict[str, Any] = field(default_factory=dict)  #: any other option of sbatch: {mail-type: FAIL}

    @property
    def component_requests(self) -> list[ClusterConfig]:
        """Return what each component of the job asks for. A job without components is its only one.

        Spares are asked for with the last component of the shape that most nodes have: they can replace these.
        """
        if not self.components:
            return [self]
        parts = [replace(self, components=[], spare_nodes=0, **own) for own in self.components]
        shapes = [(part.tasks_per_node, part.cpus_per_task, part.gpus_per_node) for part in parts]
        nodes = Counter[tuple[int, int, int]]()
        for part, shape in zip(parts, shapes, strict=True):
            nodes[shape] += part.nodes
        [(common, _)] = nodes.most_common(1)
        last = max(number for number, shape in enumerate(shapes) if shape == common)
        parts[last].spare_nodes = self.spare_nodes
        return parts

    @property
    def ranks(self) -> int:
        """Return the number of ranks that the job is to have."""
        return sum(part.nodes * part.tasks_per_node for part in self.component_requests)

    def check(self) -> None:
        """Refuse what sbatch would not accept, or would take for something else. Raises ConfigError."""
        for number, own in enumerate(self.components):
            _check_component(self, f"cluster.components[{number}]", own)
        check_extra(self)
        if self.exclude is not None:
            _check_hosts("cluster.exclude", self.exclude)
        _check_extra_sizes(self)
        if not self.components and 0 < self.gpus_per_node * self.tasks_per_gpu < self.tasks_per_node:
            raise ConfigError(
                f"cluster.tasks_per_node: {self.tasks_per_node} ranks cannot share {self.gpus_per_node} GPUs of a "
                f"node, each for {self.tasks_per_gpu}: ask for as many GPUs as ranks, or, for small models, set "
                f"cluster.tasks_per_gpu={-(-self.tasks_per_node // self.gpus_per_node)}"
            )
        if self.container is not None:
            container.parse(self.container)
            container.outermost(self.container_mounts)
        if self.setup:
            _check_setup(self.setup)


#: The keys of ``cluster`` that a component may have of its own. sbatch takes the others from the first component.
OF_COMPONENT = (
    *("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "gpu_type", "mem_gb", "exclusive"),
    *("partition", "account", "qos", "constraint", "exclude", "segment"),
)


def _check_component(cluster: ClusterConfig, where: str, own: Mapping[str, Any]) -> None:
    """Refuse a component with keys or values that ``cluster`` cannot have. Raises ConfigError."""
    for key, value in own.items():
        full = f"{where}.{key}"
        if key not in OF_COMPONENT:
            raise ConfigError(
                f"{full}: is not a key of a component; {did_you_mean(key, OF_COMPONENT)}"
                f"valid: {', '.join(OF_COMPONENT)}"
            )
        kinds = kinds_of(hints_of(ClusterConfig)[key])
        if not fits(value, kinds):
            raise ConfigError(f"{full}: {value!r} is not valid; must be {kind_names(kinds)}")
        for limit in limits_of(ClusterConfig)[key]:
            limit.check(full, value)
    try:
        replace(cluster, components=[], setup=[], extra={}, **own).check()
    except ConfigError as error:
        raise ConfigError(str(error).replace("cluster.", f"{where}.", 1)) from None


def _check_setup(lines: list[str]) -> None:
    for line in lines:
        if line.startswith(("#SBATCH", "#PBS", "#BSUB")):
            raise ConfigError(f"cluster.setup: {line!r} is an option of sbatch; use cluster.extra")
    if re.search(r"(?<!\\)(?:\\\\)*\\$", lines[-1]):
        raise ConfigError(f"cluster.setup: {lines[-1]!r} ends with a backslash, which would join the next line to it")
    # bash -n reads the lines without running them.
    if bash := shutil.which("bash"):
        # In the C locale: bash warns of a locale that this machine lacks, and what it prints counts as an error.
        text, environ = "\n".join(lines) + "\n", {**os.environ, "LC_ALL": "C"}
        checked = subprocess.run(
            [bash, "-n"], input=text, capture_output=True, text=True, errors="backslashreplace", env=environ
        )
        if checked.stderr:
            raise ConfigError(f"cluster.setup: bash cannot read these lines: {checked.stderr.strip()}")


_LINES = Path(__file__).with_name("sbatch_flags.txt").read_text().splitlines()[1:]
#: Whether a value follows a flag, by the flag's long name: value, none or optional.
FLAGS: Mapping[str, str] = {name: follows for name, _, follows in map(str.split, _LINES)}
#: The long names by the short ones.
SHORT: Mapping[str, str] = {short: name for name, short, _ in map(str.split, _LINES) if short != "-"}

_LOGS = "`toolkit logs` reads them in the run's folder, to which they are appended"
_NOTHING_IS_SUBMITTED = "sbatch would submit nothing with it"
_OTHER_CLUSTER = "status, stop and resume ask the cluster of this login node; submit where the job is to run"
_RANKS_ENVIRONMENT = "the ranks need the environment in which the job is submitted"
_PER_TASK_GPUS = "NCCL needs all GPUs of a node in each rank, which takes its own; use cluster.gpus_per_node"
_PLACES_RANKS = "the supervisor says which rank is on which node"
_READ_BY_US = "it changes what sbatch prints, from which the job's id is read"
_SUPERVISED_FROM_OUTSIDE = "the supervisor must stay outside of it; use cluster.container"
_USER = "a run belongs to the user who submits it"

#: Why a flag is refused, and what to use instead.
REFUSED: Mapping[str, str] = {
    "account": "use cluster.account",
    "array": "one submit makes one run",
    "autocomplete": _NOTHING_IS_SUBMITTED,
    "chdir": "ranks start in the folder in which the run is submitted; go there",
    "cluster": _OTHER_CLUSTER,
    "cluster-constraint": _OTHER_CLUSTER,
    "clusters": _OTHER_CLUSTER,
    "constraint": "use cluster.constraint",
    "container": _SUPERVISED_FROM_OUTSIDE,
    "container-id": _SUPERVISED_FROM_OUTSIDE,
    "container-type": _SUPERVISED_FROM_OUTSIDE,
    "cpus-per-gpu": "use cluster.cpus_per_task",
    "cpus-per-task": "use cluster.cpus_per_task",
    "distribution": _PLACES_RANKS,
    "error": _LOGS,
    "exclude": "use cluster.exclude",
    "exclusive": "use cluster.exclusive; only user, mcs and topo stand here",
    "export": _RANKS_ENVIRONMENT,
    "export-file": _RANKS_ENVIRONMENT,
    "external": "such a job has no batch script, and so no supervisor",
    "get-user-env": _RANKS_ENVIRONMENT,
    "gid": _USER,
    "gpu-bind": _PER_TASK_GPUS,
    "gpus": "use cluster.gpus_per_node",
    "gpus-per-node": "use cluster.gpus_per_node",
    "gpus-per-socket": "use cluster.gpus_per_node",
    "gpus-per-task": _PER_TASK_GPUS,
    "help": _NOTHING_IS_SUBMITTED,
    "input": "the supervisor reads no input",
    "job-name": "use name",
    "mem": "use cluster.mem_gb; 0 is all memory of a node",
    "no-kill": "use cluster.spare_nodes or retry.allow_fewer_nodes: without them the job would not be requeued",
    "nodes": "use cluster.nodes; only a range of them, such as 2-4, stands here",
    "ntasks": "use cluster.nodes and cluster.tasks_per_node",
    "ntasks-per-gpu": "use cluster.tasks_per_node",
    "ntasks-per-node": "use cluster.tasks_per_node",
    "ntasks-per-tres": "use cluster.tasks_per_node",
    "open-mode": _LOGS,
    "output": _LOGS,
    "parsable": _READ_BY_US,
    "partition": "use cluster.partition",
    "qos": "use cluster.qos",
    "quiet": _READ_BY_US,
    "segment": "use cluster.segment",
    "signal": "use cluster.save_before_limit_s",
    "tasks-per-node": "use cluster.tasks_per_node",
    "test-only": _NOTHING_IS_SUBMITTED + "; `toolkit submit --dry-run` shows the script",
    "time": "use cluster.time_min",
    "tres-bind": _PER_TASK_GPUS,
    "tres-per-task": "use cluster.cpus_per_task and cluster.gpus_per_node",
    "uid": _USER,
    "usage": _NOTHING_IS_SUBMITTED,
    "verbose": _READ_BY_US,
    "version": _NOTHING_IS_SUBMITTED,
    "wait": "sbatch would not return before the job's end; `toolkit submit --wait` waits",
    "wrap": "the script is the toolkit's; use job",
}


#: Values of refused flags that no key of ``cluster`` can express.
_BEYOND_KEYS = {"exclusive": re.compile("user|mcs|topo"), "nodes": re.compile(r"[0-9]+[-,][0-9,:-]+")}


def instead_of_flag(word: str) -> str | None:
    """Return which key stands for an option of sbatch, or why it is refused. None for what is no option of sbatch."""
    name = word.lstrip("-").replace("_", "-")
    name = SHORT.get(name, name)
    advice = REFUSED.get(name, f"use cluster.extra.{name}").partition(";")[0]
    return f"for sbatch's --{name} {advice}" if name in FLAGS else None


def as_override(name: str, value: str) -> str | None:
    """Return an option of sbatch, by its long name, as ``key=value``. None where no single key stands for it."""
    if name in _BEYOND_KEYS and _BEYOND_KEYS[name].fullmatch(value):
        return f"cluster.extra.{name}={value}"
    key = re.fullmatch("use ([a-z_.]+)(?:;.*)?", REFUSED.get(name, ""))
    if key is None:
        return None if name in REFUSED else f"cluster.extra.{name}={value or 'true'}"
    size = re.fullmatch("([0-9]+)([KMGT]?)", value)
    if name == "mem" and size is not None:
        value = f"{int(size[1]) * 1024.0 ** ('KMGT'.index(size[2] or 'M') - 2):g}"
    if name == "time" and (seconds := parse_slurms(value)) is not None:
        value = str(math.ceil(seconds / 60))
    return f"{key[1]}={value or 'true'}"


def gpus_in(cluster: ClusterConfig) -> int | None:
    """Return the GPUs of a node that ``cluster.extra.gres`` asks for. None where it asks for none."""
    gres = str(cluster.extra.get("gres", ""))
    found = re.findall(r"(?:^|,)(?:gres[/:])?gpu(?::[^,:]*[^,:0-9][^,:]*)?(?::([0-9]+))?(?=[,(]|$)", gres)
    return sum(int(count or 1) for count in found) if found else None


def _check_extra_sizes(cluster: ClusterConfig) -> None:
    """Refuse GPUs or a range of nodes in ``cluster.extra`` that the other keys contradict."""
    count = gpus_in(cluster)
    differs = any("gpus_per_node" in own for own in cluster.components)
    if count is not None and (differs or (count, cluster.gpu_type) != (cluster.gpus_per_node, None)):
        raise ConfigError(
            f"cluster.extra.gres: {cluster.extra['gres']} asks for {count} GPUs of each node; set "
            f"cluster.gpus_per_node={count} as well, by which ranks are placed, and leave cluster.gpu_type out"
        )
    least = re.match("[0-9]+", str(cluster.extra.get("nodes", "")))
    if least is not None and (cluster.components or cluster.spare_nodes or int(least[0]) > cluster.nodes):
        raise ConfigError(
            f"cluster.extra.nodes: {cluster.extra['nodes']} goes with cluster.nodes from {least[0]} on, for which the "
            "config is checked, and without cluster.spare_nodes and cluster.components"
        )


def check_extra(cluster: ClusterConfig) -> None:
    """Refuse what ``cluster.extra`` may not ask of sbatch, with the reason. Raises ConfigError."""
    seen: dict[str, str] = {}
    for key, value in cluster.extra.items():
        where, flag = f"cluster.extra.{key}", key.replace("_", "-")
        if flag in seen:
            raise ConfigError(f"{where}: is given twice, also as {seen[flag]}")
        seen[flag] = key
        # Only long names: a short one could stand for a flag that is refused or given already.
        if flag in SHORT or flag.startswith("-"):
            name = SHORT.get(flag.lstrip("-"), flag.lstrip("-"))
            raise ConfigError(f"{where}: {REFUSED.get(name) or f'write the long name of the flag, {name}'}")
        is_beyond_keys = flag in _BEYOND_KEYS and _BEYOND_KEYS[flag].fullmatch(str(value)) is not None
        if flag in REFUSED and not is_beyond_keys:
            raise ConfigError(f"{where}: {REFUSED[flag]}")
        # SPANK plugins of the site add flags that the list does not have.
        if flag not in FLAGS and flag not in _plugins_flags():
            raise ConfigError(
                f"{where}: sbatch has no flag --{flag}; {did_you_mean(flag, FLAGS.keys() - REFUSED.keys())}"
            )
        _check_value(where, flag, value)
    # Last, flags that do not go together.
    for limit in ("mem-per-cpu", "mem-per-gpu"):
        if limit in seen and cluster.mem_gb is not None:
            raise ConfigError(f"cluster.extra.{seen[limit]}: does not go with cluster.mem_gb; leave one of them out")
    if "exclusive" in seen and cluster.exclusive:
        raise ConfigError(f"cluster.extra.{seen['exclusive']}: does not go with cluster.exclusive; leave that out")
    if {"requeue", "no-requeue"} <= seen.keys():
        raise ConfigError("cluster.extra.no-requeue: does not go with requeue; leave one of them out")


def _check_value(where: str, flag: str, value: object) -> None:
    is_finite = not isinstance(value, float) or isfinite(value)
    if not isinstance(value, (str, int, float)) or value == "" or not is_finite:
        raise ConfigError(f"{where}: {value!r} must be a text, a number or true")
    if value is False and flag == "requeue":
        raise ConfigError(f"{where}: false leaves the flag out, and the job is requeued; write no-requeue: true")
    if value is True and FLAGS.get(flag) == "value":
        raise ConfigError(f"{where}: sbatch wants a value for --{flag}")
    if not isinstance(value, bool) and FLAGS.get(flag) == "none":
        raise ConfigError(f"{where}: --{flag} takes no value; write true")
    if flag == "nodelist" and isinstance(value, str):
        _check_hosts(where, value)


def _check_hosts(key: str, text: str) -> None:
    """Refuse a list of hosts that Slurm would read as other hosts.

    To Slurm ``n[1`` is a host ``n]``. A text with a slash is a file for sbatch, which holds a list. Raises ConfigError.
    """
    if "/" in text:
        if not Path(text).is_file():
            raise ConfigError(f"{key}: there is no file {text}; give it, or a list of hosts such as node[01-04,07]")
        return
    try:
        hosts = hostlist.expand(text)
    except RequestError as error:
        raise ConfigError(f"{key}: {error}") from None
    odd = [host for host in hosts if not re.fullmatch(r"[\w.-]+", host)]
    if odd or not hosts:
        raise ConfigError(f"{key}: {odd[0] if odd else text!r} is not a host's name")


def _plugins_flags() -> frozenset[str]:
    """Return the long names of the flags of this site's sbatch, SPANK plugins included. Empty without an sbatch."""
    try:
        return commands.Slurm().sbatch_flags()
    except SlurmError:
        return frozenset()
