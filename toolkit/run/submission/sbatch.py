"""Makes the sbatch script of a run: every key of ``cluster`` in Slurm's terms.

submitit makes the text from these terms.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.base import staged
from toolkit.config import ClusterConfig, JobConfig
from toolkit.config.cluster import gpus_in
from toolkit.config.validation import may_lose_nodes
from toolkit.files.rundir import RunDir
from toolkit.run.prepare import snapshot
from toolkit.run.requeue import follow_up


def sbatch_script(config: JobConfig, run: RunDir) -> str:
    """Return the text that submitit hands to sbatch, made by submitit itself."""
    command = f"{exec_python()} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return with_components(_text_of(run, command, slurm_parameters(config, run, "TOKEN")), config, run)


def with_components(script: str, config: JobConfig, run: RunDir) -> str:
    """Return a batch script with the options of the job's other components behind those of the first."""
    lines, blocks = script.split("\n"), list[str]()
    for part in config.cluster.parts[1:]:
        options = _text_of(run, "", slurm_parameters(config, run, "", part)).split("\n")
        blocks += [
            "#SBATCH hetjob",
            *(line for line in options if line.startswith("#SBATCH") and not _WHOLE.match(line)),
        ]
    first = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH")) + 1
    return "\n".join([*lines[:first], *blocks, *lines[first:]])


#: Options that sbatch takes from the first component alone.
_WHOLE = re.compile(r"#SBATCH --(?:job-name|output|error|open-mode|signal|wckey|dependency|requeue|no-requeue)\b")


def _text_of(run: RunDir, command: str, values: Mapping[str, Any]) -> str:
    from submitit.slurm.slurm import _make_sbatch_string

    return str(_make_sbatch_string(command=command, folder=run.submitit, **values))


def follow_up_script(run: RunDir, config: JobConfig, token: str, job_id: str) -> str:
    """Return the script of a follow-up job. It lacks requests about one job's place in the queue."""
    cluster = config.cluster
    extra = {key: value for key, value in cluster.extra.items() if not follow_up.is_for_one_job(key)}
    inherited = replace(config, cluster=replace(cluster, extra=extra))
    values = slurm_parameters(inherited, run, token)
    for name, value in follow_up.environment(run, [job_id]).items():
        values["setup"].append(f"export {name}={shlex.quote(value)}")
    return with_components(_text_of(run, follow_up.command(run), values), inherited, run)


def exec_python() -> str:
    """Return the Python command with ``exec``.

    A bash between Slurm and the supervisor would die at the first SIGTERM, and take the supervisor along.
    """
    return f"exec {shlex.quote(str(staged.origin(sys.executable)))}"


def slurm_parameters(
    config: JobConfig, run: RunDir, token: str, component: ClusterConfig | None = None
) -> dict[str, Any]:
    """Return submitit's parameters for this job: every key of ``cluster`` in Slurm's terms.

    Of a heterogeneous job they are those of one of its components, the first if None.

    GPUs are asked for at job level: a request per task would hide the peers' devices from NCCL.
    """
    parts = config.cluster.parts
    cluster = component or parts[0]
    quoted = {name: shlex.quote(value) for name, value in snapshot.job_environment(run, {}, token).items()}
    quoted["PYTHONPATH"] += '"${PYTHONPATH:+:$PYTHONPATH}"'
    exports = [f"export {name}={value}" for name, value in quoted.items()]
    values: dict[str, Any] = {
        "job_name": config.name,
        "nodes": cluster.nodes + cluster.spare_nodes,
        "ntasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "gpus_per_node": _gpus(cluster),
        "time": cluster.time_min,
        "exclusive": cluster.exclusive or None,
        "wckey": None,  # submitit's own default, "submitit", is refused where wckeys are enforced
        "use_srun": False,  # the supervisor runs on the batch host, outside any step, and starts srun itself
        "stderr_to_stdout": True,
        # Ours come last: `module load` may set PYTHONPATH.
        "setup": [follow_up.IGNORE_SIGNALS, *cluster.setup, *exports],
    }
    others: dict[str, Any] = {"signal": f"B:USR2@{cluster.signal_delay_s}"}  # to the supervisor; ranks would die of it
    # A component of one node goes without: if it is lost, Slurm would requeue that component alone, and hold the job.
    if may_lose_nodes(config, sum(part.nodes + part.spare_nodes for part in parts)) and values["nodes"] > 1:
        others["no-kill"] = True
    if cluster.mem_gb is not None:
        others["mem"] = f"{round(cluster.mem_gb * 1024)}M"
    if cluster.segment is not None:
        others["segment"] = cluster.segment
    for key, value in cluster.extra.items():
        if value is not False:
            others[str(key).replace("_", "-")] = _text(value)
    values["additional_parameters"] = others
    for name in _CHOOSING_NODES:
        values[name] = _text(getattr(cluster, name))
    if "nodes" in others:  # a range of them
        del values["nodes"]
    return {name: value for name, value in values.items() if value is not None or name == "wckey"}


#: Keys of ``cluster`` that are named as the flags which choose the nodes.
_CHOOSING_NODES = ("partition", "account", "qos", "constraint", "exclude")
#: Flags of sbatch without a config key of their own that decide whether and where srun gets nodes.
_PLACING = ("nodelist", "reservation", "wckey", "licenses", "gres")


def srun_options(config: JobConfig) -> list[str]:
    """Return the node choice of ``cluster`` as options of srun.

    That srun holds nodes for seconds, from the login node.
    """
    cluster = config.cluster
    values: dict[str, Any] = {"job-name": "doctor", "time": 5, "gpus-per-node": _gpus(cluster)}
    values |= {name: getattr(cluster, name) for name in _CHOOSING_NODES}
    values |= {name: cluster.extra.get(name) for name in _PLACING}
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    if cluster.exclusive:
        options.append("--exclusive")
    return options


def _text(value: Any) -> Any:
    """Escape backslashes. submitit quotes for a shell, but sbatch reads one as an escape also in single quotes."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _gpus(cluster: ClusterConfig) -> str | int | None:
    if cluster.gpus_per_node == 0 or gpus_in(cluster) is not None:  # else sbatch would get both
        return None
    return f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
