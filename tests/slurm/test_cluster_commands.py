"""`toolkit.slurm` on a real Slurm: what its commands say and what its ranks derive."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box
from toolkit.config.cluster import FLAGS
from toolkit.slurm.placement import derive, launch_key
from toolkit.slurm.states import Phase, phase

pytestmark = pytest.mark.slurm

DUMP = """
import json, os, pathlib, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["SLURM_PROCID"]
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({**os.environ, "HOST_OF_RANK": os.uname().nodename}))
"""


@pytest.fixture
def shared(box: Box, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = box.shared / request.node.name.replace("[", "-").rstrip("]")
    folder.mkdir()
    (folder / "dump.py").write_text(DUMP)
    yield folder
    box.run(["scancel", "--user=root"])
    box.wait_idle()


def environments(folder: Path) -> list[dict[str, str]]:
    """Of every rank, in rank order."""
    files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in files]


def ask(box: Box, code: str) -> Any:
    """The JSON that Python prints on the login side, where ``s`` is a Slurm."""
    head = "import json, dataclasses; from toolkit.slurm.commands import Slurm; s = Slurm()\n"
    return json.loads(box.run([sys.executable, "-c", head + code]).stdout)


def test_the_controllers_clock_is_that_of_the_machine_here(box: Box) -> None:
    assert abs(ask(box, "import time; print(s.clock() - time.time())")) < 10


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_an_uneven_arbitrary_step_tells_every_rank_its_place(box: Box, shared: Path, mpi: str) -> None:
    order = ["node1", "node3", "node1", "node2"]  # two CPUs a node on a strict site
    (shared / "hosts").write_text("\n".join(order) + "\n")
    arguments = [f"--mpi={mpi}", f"--ntasks={len(order)}", "--distribution=arbitrary"]
    command = ["python3", str(shared / "dump.py"), str(shared)]
    step = ["env", f"SLURM_HOSTFILE={shared}/hosts", "srun", *arguments, *command]
    box.run(["salloc", "--nodes=3", "--nodelist=node[1-3]", "--exclusive", *step])
    ranks = environments(shared)
    places = [derive(environ, "?") for environ in ranks]
    assert [place.launcher for place in places] == ["srun"] * len(order)
    assert [place.host for place in places] == order
    assert [place.hosts[place.node_rank] for place in places] == order
    assert [place.local_world_size for place in places] == [order.count(host) for host in order]
    assert [place.local_rank for place in places] == [order[:rank].count(host) for rank, host in enumerate(order)]
    assert len({launch_key(environ) for environ in ranks}) == 1


def test_a_step_on_part_of_an_allocation_stands_where_its_host_file_says(box: Box, shared: Path) -> None:
    order = ["node3", "node1", "node3"]  # not in the order of the allocation, and without its node2
    (shared / "hosts").write_text("\n".join(order) + "\n")
    supervisor = f"""
import os
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv
step = SrunStep(["python3", "{shared}/dump.py", "{shared}"], {order}, 1, "{shared}/rank-%t.log")
os.environ["SLURM_NTASKS_PER_NODE"] = "2"
environ = step_environment(os.environ) | {{"SLURM_HOSTFILE": "{shared}/hosts", "TOOLKIT_ATTEMPT": "0"}}
os.execvpe("srun", srun_argv(step), environ)
"""
    (shared / "supervisor.py").write_text(supervisor)
    (shared / "job.sh").write_text(
        f"#!/bin/bash\nexport PYTHONPATH=$PWD\nexec {sys.executable} {shared}/supervisor.py\n"
    )
    size = ["--nodes=3", "--ntasks-per-node=2"]
    answer = box.run(["sbatch", "--parsable", *size, f"--output={shared}/log", f"{shared}/job.sh"])
    assert box.wait_job(answer.stdout.strip())["JobState"] == "COMPLETED", (shared / "log").read_text()
    places = [derive(environ, "?") for environ in environments(shared)]
    assert [(place.launcher, place.host, place.nodes) for place in places] == [("supervisor", h, 2) for h in order]


def test_a_het_step_is_one_launch(box: Box, shared: Path) -> None:
    command = ["python3", str(shared / "dump.py"), str(shared)]
    box.run(["srun", "--nodes=1", "--ntasks=1", *command, ":", "--nodes=2", "--ntasks=3", *command])
    ranks = environments(shared)
    places = [derive(environ, "?") for environ in ranks]
    assert [(place.rank, place.world_size, place.nodes) for place in places] == [(rank, 4, 3) for rank in range(4)]
    assert [place.host for place in places] == [environ["HOST_OF_RANK"] for environ in ranks]
    assert len({launch_key(environ) for environ in ranks}) == 1


def test_mpirun_over_two_nodes_is_the_innermost_launcher(box: Box, shared: Path) -> None:
    mpirun = f"{sys.prefix}/bin/mpirun --allow-run-as-root"
    (shared / "job.sh").write_text(f"#!/bin/bash\n{mpirun} -n 4 python3 {shared}/dump.py {shared}\n")
    size = ["--nodes=2", "--ntasks-per-node=2"]
    answer = box.run(["sbatch", "--parsable", *size, f"--output={shared}/log", f"{shared}/job.sh"])
    box.wait_job(answer.stdout.strip())
    ranks = environments(shared)
    places = [derive(environ, environ["HOST_OF_RANK"]) for environ in ranks]
    assert [(place.launcher, place.rank, place.world_size) for place in places] == [("mpi", n, 4) for n in range(4)]
    # prterun may number a node's ranks in any order
    assert {(place.host, place.local_rank) for place in places} == {(h, n) for h in ("node1", "node2") for n in (0, 1)}
    assert len({(place.host, place.node_rank) for place in places}) == 2
    assert len({launch_key(environ) for environ in ranks}) == 1


def test_a_batch_script_is_alone(box: Box, shared: Path) -> None:
    script = f"#!/bin/bash\npython3 {shared}/dump.py {shared}\n"
    (shared / "job.sh").write_text(script)
    answer = box.run(["sbatch", "--parsable", "--ntasks=3", f"--output={shared}/log", f"{shared}/job.sh"])
    box.wait_job(answer.stdout.strip())
    (environ,) = environments(shared)
    place = derive(environ, "?")
    assert (place.launcher, place.world_size, launch_key(environ)) == ("alone", 1, None)
    assert "3 tasks" in place.notes[0]


def test_a_job_is_shown_requeued_and_cancelled(box: Box, shared: Path) -> None:
    # The comment and the spaces would mislead a naive parser; a second requeue and a second cancel must do no harm.
    story = f"""
import time
def until(job, state):
    while s.show_job(job).state != state: time.sleep(0.1)
    return dataclasses.asdict(s.show_job(job))
job = s.sbatch(["--time=5", "--job-name=a b", "--comment=x JobState=FAILED", "--output={shared}/a b.log",
                "--wrap", "sleep 60"])
rows = [until(job, "RUNNING")]
s.requeue(job); s.requeue(job)
rows.append(until(job, "PENDING"))
s.exclude_nodes(job, "node2")
s.cancel(job)
rows.append(until(job, "CANCELLED"))
s.cancel(job)
statuses = s.show_jobs([job, "999999"])
print(json.dumps([s.available(), rows, {{k: v and v.state for k, v in statuses.items()}}, s.show_job("999999")]))
"""
    is_available, (running, pending, cancelled), statuses, unknown = ask(box, story)
    assert is_available
    assert (running["name"], running["time_limit_s"], running["restarts"]) == ("a b", 300.0, 0)
    assert running["end_time"] - running["start_time"] == 300.0
    assert running["stdout_path"] == f"{shared}/a b.log"
    assert (pending["restarts"], cancelled["state"]) == (1, "CANCELLED")
    assert statuses == {cancelled["job_id"]: "CANCELLED", "999999": None}
    assert unknown is None


def test_one_element_of_an_array_is_requeued_and_signalled(box: Box, shared: Path) -> None:
    # Element 1 must stay as it is while element 0 is requeued, and only its step is killed then.
    # Slurm loses a KILL for a step that its node has not started yet: the task says when it runs.
    task = f"touch {shared}/runs.$SLURM_ARRAY_TASK_ID && exec sleep 60"
    story = f"""
import time, pathlib
def until(job, condition):
    while not condition(s.show_job(job)): time.sleep(0.1)
task = "exec srun -J main sh -c '{task}'"
array = s.sbatch(["--array=0-1", "--time=5", "--output={shared}/%a.log", "--wrap", task])
for index in (0, 1):
    until(f"{{array}}_{{index}}", lambda row: row.state == "RUNNING")
while not pathlib.Path("{shared}/runs.1").exists(): time.sleep(0.1)
s.requeue(array + "_0")
until(array + "_0", lambda row: row.restarts == 1)
other = s.show_job(array + "_1")
s.cancel(array + "_1", signal="KILL", step=s.find_step(array + "_1", "main"))
until(array + "_1", lambda row: row.is_over)
print(json.dumps([other.state, other.restarts, s.show_job(array + "_1").state]))
"""
    assert ask(box, story) == ["RUNNING", 0, "FAILED"]


def test_every_state_that_squeue_knows_is_classed(box: Box) -> None:
    refusal = box.run(["squeue", "--states=nonsense"], check=False).stderr
    known = refusal.partition("Valid job states include:")[2].split()[0].split(",")
    assert len(known) >= 24
    assert [state for state in known if phase(state) is Phase.UNKNOWN] == []


def test_a_refusal_says_what_slurm_said(box: Box) -> None:
    story = """
try: s.sbatch(["--partition=nowhere", "--wrap", "true"])
except Exception as error: print(json.dumps([[c.__name__ for c in type(error).__mro__], str(error)]))
"""
    kinds, text = ask(box, story)
    assert "SlurmRefusedError" in kinds
    assert "invalid partition specified: nowhere" in text
    assert "What to do" in text


def test_every_option_that_this_sbatch_lists_is_one_that_a_config_is_checked_against(box: Box) -> None:
    listed = set(ask(box, "print(json.dumps(sorted(s.sbatch_flags())))"))
    assert {"nodelist", "mail-type", "no-requeue"} <= listed
    assert listed <= FLAGS.keys()
