"""Ranks and store host inside an image, the supervisor outside, on a real Slurm.

Neither Apptainer nor Pyxis can be had here. Stand-ins take their command lines apart, as strictly as they would, and
start what is asked for in the same file system: what is proved is who starts where, in what order, and how it ends.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.slurm.site import END_S, Site, reached
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

#: `apptainer exec [options] IMAGE COMMAND ...`.
APPTAINER = """#!/bin/sh
[ "$1" = exec ] || exit 64
shift
while :; do
    case "$1" in
        --bind=/*) [ -d "${1#--bind=}" ] || exit 65 ;;
        --pwd=/*) cd "${1#--pwd=}" || exit 66 ;;
        --*) exit 67 ;;
        *) break ;;
    esac
    shift
done
image=$1
shift
echo "$image: $*" >> "$CONTAINER_LOG"
exec "$@"
"""
#: An srun with Pyxis: its three options are known, and what they say holds for the step.
PYXIS = """#!/bin/sh
image=
for word in "$@"; do
    shift
    case "$word" in
        --container-image=*) image=${word#*=} ;;
        --container-mounts=/*:/*) ;;
        --container-workdir=/*) cd "${word#*=}" || exit 66 ;;
        --container-*) exit 67 ;;
        *) set -- "$@" "$word" ;;
    esac
done
[ -z "$image" ] || echo "$image: $*" >> "$CONTAINER_LOG"
exec SRUN "$@"
"""


@pytest.mark.parametrize("runtime", [pytest.param("apptainer", marks=pytest.mark.soak), "pyxis"])
def test_ranks_and_store_host_run_in_the_container_and_a_killed_rank_comes_back(site: Site, runtime: str) -> None:
    log, programs = site.folder / "container.log", site.folder / "bin"
    image = site.folder / ("torch.sif" if runtime == "apptainer" else "torch.sqsh")
    programs.mkdir()
    name, text = ("apptainer", APPTAINER) if runtime == "apptainer" else ("srun", PYXIS)
    (programs / name).write_text(text.replace("SRUN", site.run("which", "srun").strip()))
    (programs / name).chmod(0o755)
    for path in (image, log):
        path.touch()
        path.chmod(0o666)
    python = Path(sys.executable).parent  # the image's python3
    search = f"{programs}:{python}:{site.run('printenv', 'PATH').strip()}"
    out = site.run(
        *("toolkit", "submit", "configs/digits_ddp.yaml", f"cluster.container={image}"),
        *("cluster.nodes=2", "cluster.tasks_per_node=1", "train.epochs=100", "checkpoint.every_steps=20"),
        PATH=search,
        CONTAINER_LOG=str(log),
    )
    run = site.only_run()
    reached(run, 40)
    inside = [line for line in log.read_text().splitlines() if line.startswith(f"{image}: ")]
    assert sum("toolkit.ranks.store_host" in line for line in inside) == 1, out
    assert sum("-m toolkit run " in line for line in inside) == (2 if runtime == "apptainer" else 1)
    assert all(f"env PYTHONPATH={run.code} PYTHONNOUSERSITE=1 python3 -P -m toolkit" in line for line in inside)

    os.kill(site.ranks()[0], signal.SIGKILL)
    wait_for(run.result, END_S, "the end")
    assert run.result().state == "completed"
    first, second = run.attempts()
    assert (first.cause, first.decision) == ("crashed", "restart")
    assert second.step_start >= 20
    assert log.read_text().count("toolkit.ranks.store_host") == 2
    assert "supervise" not in log.read_text()
    site.box.wait_job(site.job_of(run), END_S)
    assert not [command for _, command in site.processes() if "store_host" in command]
