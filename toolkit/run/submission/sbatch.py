"""Makes the sbatch script of a run: every key of ``cluster`` in Slurm's terms.

submitit makes the text from these terms.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import Any

from toolkit.base import staged
from toolkit.config import ClusterConfig, JobConfig
from toolkit.files.rundir import RunDir
from toolkit.run.job.nodes import may_lose_nodes
from toolkit.run.prepare import snapshot
from toolkit.run.requeue import follow_up


def sbatch_script(config: JobConfig, run: RunDir) -> str:
    """Return the text that submitit hands to sbatch, made by submitit itself."""
    from submitit.slurm.slurm import _make_sbatch_string

    command = f"{exec_python()} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return str(_make_sbatch_string(command=command, folder=run.submitit, **slurm_parameters(config, run, "TOKEN")))


def follow_up_script(run: RunDir, config: JobConfig, token: str, job_id: str) -> str:
    """Return the script of a follow-up job. It lacks requests about one job's place in the queue."""
    from submitit.slurm.slurm import _make_sbatch_string

    cluster = config.cluster
    extra = {key: value for key, value in cluster.extra.items() if not follow_up.is_for_one_job(key)}
    inherited = replace(config, cluster=replace(cluster, extra=extra))
    values = slurm_parameters(inherited, run, token)
    for name, value in follow_up.environment(run, [job_id]).items():
        values["setup"].append(f"export {name}={shlex.quote(value)}")
    return str(_make_sbatch_string(command=follow_up.command(run), folder=run.submitit, **values))


def exec_python() -> str:
    """Return the Python command with ``exec``.

    A bash between Slurm and the supervisor would die at the first SIGTERM, and take the supervisor along.
    """
    return f"exec {shlex.quote(str(staged.origin(sys.executable)))}"


def slurm_parameters(config: JobConfig, run: RunDir, token: str) -> dict[str, Any]:
    """Return submitit's parameters for this job: every key of ``cluster`` in Slurm's terms.

    GPUs are asked for at job level: a request per task would hide the peers' devices from NCCL.
    """
    cluster = config.cluster
    nodes = cluster.nodes + cluster.spare_nodes
    quoted = {name: shlex.quote(value) for name, value in snapshot.job_environment(run, {}, token).items()}
    quoted["PYTHONPATH"] += '"${PYTHONPATH:+:$PYTHONPATH}"'
    exports = [f"export {name}={value}" for name, value in quoted.items()]
    values: dict[str, Any] = {
        "job_name": config.name,
        "nodes": nodes,
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
    if may_lose_nodes(config, nodes):
        others["no-kill"] = True
    if cluster.mem_gb is not None:
        others["mem"] = f"{round(cluster.mem_gb * 1024)}M"
    for key, value in cluster.extra.items():
        if value is not False:
            others[str(key).replace("_", "-")] = _text(value)
    values["additional_parameters"] = others
    for name in _CHOOSING_NODES:
        values[name] = _text(getattr(cluster, name))
    return {name: value for name, value in values.items() if value is not None or name == "wckey"}


#: Keys of ``cluster`` that are named as the flags which choose the nodes.
_CHOOSING_NODES = ("partition", "account", "qos", "constraint", "exclude")
#: Flags of sbatch without a config key of their own that decide whether and where srun gets nodes.
_PLACING = ("nodelist", "reservation", "wckey", "licenses")


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
    if cluster.gpus_per_node == 0:
        return None
    return f"{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else cluster.gpus_per_node
