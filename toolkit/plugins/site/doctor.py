"""`toolkit doctor`: the checks that a job makes before its ranks start, made by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.base import logs
from toolkit.base.errors import RequestError, SlurmError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.line_channel import LineChannel, open_channel
from toolkit.plugins.site import site_profile
from toolkit.plugins.site.checks import FIRST_NODE, LAUNCHER, CheckRequest, speed
from toolkit.plugins.site.checks.preflight import SharedFolder, command
from toolkit.plugins.site.checks.verdict import NodesReport, judge, prevented
from toolkit.plugins.site.proof import prove
from toolkit.plugins.site.site_profile import SiteProfile
from toolkit.plugins.site.slurm_site import USED, missing_programs, read_site
from toolkit.plugins.site.srun_checks import Start, ask_nodes
from toolkit.plugins.site.versions import versions
from toolkit.run.submission import sbatch
from toolkit.slurm.commands import Slurm
from toolkit.slurm.environment import submit_environment
from toolkit.slurm.programs import PROBE_TIMEOUT_S
from toolkit.slurm.srun_commands import srun_nodes_argv

#: Columns of the table, by check. A column is left out if no node has a figure for it.
COLUMNS = {
    "CPUS": "cpus",
    "TAKEN": "cpus taken",
    "GPUS": "gpus",
    "GPU MEM": "gpu memory",
    "CORE": speed.CORE,
    "MEMORY": speed.MEMORY,
    "RUNS FREE": "run folder space",
    "TEMP FREE": "temp space",
    "CLOCK": "clock",
    "ADDRESS": "network",
    "INFINIBAND": "infiniband",
}

#: For each program that reads the site: a user waits for all of them.
SITE_TIMEOUT_S = 15.0

log = logs.get(__name__)


def examine(config: JobConfig, nodes: int | None = None) -> NodesReport:
    """Check the nodes of this process's allocation, or new ones, or this machine.

    Outside an allocation Slurm is asked for ``nodes`` nodes (``cluster.nodes`` if None), as it would be for the
    config's job. Without Slurm this machine is checked.
    """
    environ = os.environ
    if "SLURM_JOB_ID" in environ:
        return _examine_allocation(Allocation.slurm(environ, Slurm()), nodes, environ)
    config.cluster.nodes = nodes or config.cluster.nodes
    if Slurm().available():
        cluster = config.cluster
        cpus = cluster.tasks_per_node * cluster.cpus_per_task
        # The nodes are not chosen yet: they check the network against the first of them, and have no names until they
        # answer.
        shared = SharedFolder(_folder())
        gpus = cluster.gpus_per_node
        request = CheckRequest(str(shared.path), shared.token, [cpus], gpus, FIRST_NODE, may_load=True)
        options = [f"--cpus-per-task={cpus}", *sbatch.srun_options(config)]
        log.info("waiting for %d nodes; Ctrl-C ends it", cluster.nodes)

        def start(request: CheckRequest, hosts: Sequence[str]) -> LineChannel:
            return LineChannel(srun_nodes_argv(command(request), len(hosts), options), submit_environment(environ))

        names = [f"node {number} of {cluster.nodes}" for number in range(1, cluster.nodes + 1)]
        return _ask(shared, request, names, start, is_queued=True)
    return _examine_allocation(Allocation.local(config.cluster), None, environ)


def _examine_allocation(allocation: Allocation, nodes: int | None, environ: Mapping[str, str]) -> NodesReport:
    there = len(allocation.hosts)
    if allocation.components:
        raise RequestError(
            "toolkit doctor looks at nodes by one step of srun, and this heterogeneous job needs several; "
            "call it on a login node, with cluster.partition=NAME for each kind of nodes"
        )
    if nodes is not None and nodes > there:
        raise RequestError(f"--nodes {nodes}: this allocation has {there}; ask for fewer, or call it on a login node")
    count = nodes or there
    shared = SharedFolder(_folder())
    in_job = "SLURM_JOB_ID" in environ
    # Inside a job the ranks' network leads to the launcher; without Slurm the loopback is enough. One step looks at all
    # nodes, and gets as many GPUs on each as the node with the fewest has.
    request = CheckRequest(
        folder=str(shared.path),
        token=shared.token,
        cpus=[tasks * allocation.cpus_per_task for tasks in allocation.tasks[:count]],
        gpus=min(allocation.gpus, default=0),
        peer=LAUNCHER if in_job else "127.0.0.1",
    )

    def start(request: CheckRequest, hosts: Sequence[str]) -> LineChannel:
        # Without Slurm there is only this machine, and no srun.
        if not in_job:
            return LineChannel(command(request), environ)
        return open_channel(command(request), hosts, environ, allocation.gres(allocation.hosts))

    return _ask(shared, request, allocation.hosts[:count], start)


def _ask(
    shared: SharedFolder, request: CheckRequest, hosts: Sequence[str], start: Start, *, is_queued: bool = False
) -> NodesReport:
    began = time.monotonic()
    try:
        # Without a working shared folder no node could prove that it sees the same one.
        in_the_way = shared.prepare()
        if in_the_way is not None:
            return prevented(hosts, in_the_way, time.monotonic() - began)
        nodes, errors, took_s = ask_nodes(request, hosts, start, is_queued=is_queued)
        shared.read_answers(nodes)
        return judge(nodes, took_s, errors)
    except OSError as error:  # there is no srun
        return prevented(hosts, str(error), time.monotonic() - began)
    finally:
        shared.remove()


def read_site_here() -> tuple[SiteProfile | None, str]:
    """Read the cluster and write its profile. Return it, and a line about it; None and the reason without Slurm.

    Proofs that an earlier profile of the same cluster has are kept.
    """
    slurm = Slurm(timeout_s=SITE_TIMEOUT_S)
    if not slurm.available():
        missing = missing_programs(slurm)
        if len(missing) == len(USED):
            return None, "no Slurm here: sbatch and scontrol are not on PATH"
        if missing:
            return None, f"Slurm is only half installed here: not on PATH: {', '.join(missing)}"
        return None, f"Slurm's controller does not answer within {PROBE_TIMEOUT_S:g} s: `scontrol ping`"
    try:
        profile = read_site(slurm).replace(versions=versions())
    except (RequestError, SlurmError) as error:
        return None, f"the site cannot be read: {error}"
    # A proof takes a job, which this reading has not run.
    earlier = site_profile.read()
    if earlier is not None and earlier[0].cluster == profile.cluster:
        profile = profile.replace(**earlier[0].given("proofs", "proven"))
    return profile, written(profile)


def prove_site(
    config: JobConfig, nodes: int | None, profile: SiteProfile | None, about_profile: str
) -> tuple[SiteProfile, str]:
    """Try the site out by a short run, and write the profile with the proofs. Return it, and a line about it.

    Raises RequestError without Slurm, or inside of a job.
    """
    if profile is None:
        raise RequestError(f"toolkit doctor --prove needs Slurm: {about_profile}")
    if "SLURM_JOB_ID" in os.environ:
        raise RequestError("toolkit doctor --prove submits a job of its own: call it on a login node")
    part = profile.partition(config.cluster.partition)
    count = nodes or min(2, max(1, part.nodes if part else 2))
    proofs, took_s = prove(config, count, profile)
    log.info("the proofs took %.0f s", took_s)
    profile = profile.replace(proofs=tuple(proofs), proven=round(time.time(), 3))
    return profile, written(profile)


def written(profile: SiteProfile) -> str:
    """Write the profile. Return a line that says where, or why not."""
    try:
        return f"site profile: {site_profile.write(profile)}"
    except OSError as error:
        return f"site profile: not written: {error.filename or ''}: {error.strerror}"


def _folder() -> Path:
    """Return the folder of runs, or the nearest that exists above. A check must not create it."""
    root = rundir.runs_root()
    return next(folder for folder in (root, *root.parents) if folder.is_dir())


# -------------------------------------------------------------------------------------------------------------- telling


def rows(report: NodesReport) -> list[tuple[str, ...]]:
    """Return a table: a head, and a row for each node."""
    figures = {host: {f.check: f.figure for f in findings} for host, findings in report.findings.items()}
    known = {check for by_check in figures.values() for check in by_check}
    columns = {head: check for head, check in COLUMNS.items() if check in known}
    table: list[tuple[str, ...]] = [("NODE", "VERDICT", *columns)]
    for host, by_check in figures.items():
        table.append((host, _verdict(report, host), *(by_check.get(check, "-") for check in columns.values())))
    return table


def as_dict(report: NodesReport) -> dict[str, Any]:
    """Return the report as one value for JSON."""
    nodes = {
        host: {
            "verdict": _verdict(report, host),
            "bad": report.bad.get(host),
            "warning": report.warnings.get(host),
            "findings": [asdict(finding) for finding in report.findings.get(host, ())],
        }
        for host in report.hosts
    }
    return {"fine": report.is_fine, "common": list(report.common), "nodes": nodes, "took_s": report.took_s}


def _verdict(report: NodesReport, host: str) -> str:
    if host in report.bad:
        return "bad"
    return "warning" if host in report.warnings else "ok"
