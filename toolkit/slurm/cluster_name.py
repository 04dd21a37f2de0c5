"""The name of the cluster that Slurm's programs speak to here. Each cluster numbers its jobs by itself."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from toolkit.base.errors import SlurmError

#: Where ``slurm.conf`` lies if no variable says it.
_PLACES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")


def name_here(environ: Mapping[str, str] | None = None) -> str:
    """Return the cluster's name in lower case, as Slurm keeps it; empty where it cannot be told.

    ``SLURM_CLUSTERS`` counts first: it sends every program there. A job is told by Slurm where it runs, ``slurm.conf``
    names the cluster of a login node, and where there is no such file the controller is asked.
    """
    environ = os.environ if environ is None else environ
    given = environ.get("SLURM_CLUSTERS")
    if given is not None:
        return given.lower() if re.fullmatch(r"[\w.-]+", given) and given.lower() != "all" else ""
    name = name_in_job(environ) or name_in_config(environ)
    if name or shutil.which("scontrol", path=environ.get("PATH", os.defpath)) is None:
        return name
    from toolkit.slurm import commands  # takes longer to import than a command that only looks at files

    try:
        return commands.Slurm(environ).settings().cluster.lower()
    except SlurmError:  # a controller that does not answer
        return ""


def name_in_job(environ: Mapping[str, str]) -> str:
    """Return the name that Slurm has given a job; empty outside of a job."""
    return environ.get("SLURM_CLUSTER_NAME", "").lower() if "SLURM_JOB_ID" in environ else ""


def name_in_config(environ: Mapping[str, str]) -> str:
    """Return the name in the first ``slurm.conf`` that has one; empty without."""
    program = shutil.which("squeue", path=environ.get("PATH")) or ""
    beside = Path(program).resolve().parent.parent / "etc/slurm.conf"
    configs = [environ["SLURM_CONF"]] if environ.get("SLURM_CONF") else [str(beside), *_PLACES]
    return next(filter(None, map(_name_in, configs)), "")


def _name_in(config: str) -> str:
    try:
        match = re.search(r"(?im)^\s*ClusterName\s*=\s*[\"']?([^\s\"'#]+)", Path(config).read_text(errors="replace"))
    except OSError:
        return ""
    return match[1].lower() if match else ""
