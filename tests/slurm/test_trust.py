"""A second user of the cluster, as an attacker.

They are on the network of a run, in a shared folder, and have sources of their own.
"""

import json
from pathlib import Path

import pytest

from tests.slurm.site import END_S, START_S, Site, reached
from tests.waiting import wait_for
from toolkit.run.records.user_requests import Intent

pytestmark = pytest.mark.slurm

STRANGER = "alice"  # the runs of these stories are root's
#: With torch's own client, from a node of the network: damage, and orders in the ranks' words.
ATTACK = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
host, port = sys.argv[1], int(sys.argv[2])
store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
for key in ("toolkit/agree/0/proposal", "toolkit/agree/0/call/1"):
    store.set(key, "not JSON")
print(len(store.list_keys()))
"""


def variables_of_a_rank(site: Site) -> dict[str, str]:
    def found() -> dict[str, str] | None:
        for pid, command in site.box.processes():
            if "toolkit run" in command:
                pairs = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
                environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if "SLURM_PROCID" in environ and "MASTER_PORT" in environ:
                    return environ
        return None

    return wait_for(found, START_S, "a rank")


def listening(site: Site, node: str, port: int) -> set[str]:
    """The addresses, as the kernel shows them, on which this port is open."""
    lines = site.box.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], node=node).stdout.splitlines()
    rows = [line.split() for line in lines]
    return {row[1] for row in rows if len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def test_what_a_stranger_writes_into_the_store_neither_ends_nor_steers_the_run(site: Site) -> None:
    size = ["cluster.nodes=2", "cluster.tasks_per_node=1", "train.epochs=2000", "checkpoint.every_steps=50"]
    site.submit("configs/digits_ddp.yaml", *size)
    run = site.only_run()
    reached(run, 20)
    environ = variables_of_a_rank(site)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    own = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    assert listening(site, run.status().host, port) == {f"{own}:{port:04X}"}  # and no wildcard
    attack = ["python", "-c", ATTACK, host, str(port)]
    assert int(site.box.run(attack, node="node4", user=STRANGER, timeout=END_S).stdout) > 5
    reached(run, run.step() + 50)
    assert run.attempts() == []
    assert run.result() is None
    site.run("toolkit", Intent.STOP.value, run.id)
    result = wait_for(run.result, END_S, "the end of the run")
    assert (result.state, len(run.attempts())) == ("stopped", 1)


NEW = "from toolkit.files import rundir; print(rundir.create('digits').path)"


def test_two_users_share_a_runs_folder_and_neither_runs_the_others_sources(site: Site) -> None:
    runs = site.box.shared / f"{site.folder.name}-shared"  # root's, on a strict site too
    runs.mkdir()
    runs.chmod(0o1777)
    path = {"TOOLKIT_RUNS": str(runs)}
    owners = Path(site.box.run(["python", "-c", NEW], env=path).stdout.strip())
    strangers = Path(site.box.run(["python", "-c", NEW], env=path, user=STRANGER).stdout.strip())
    assert owners.parent == runs / "digits"
    assert strangers.parent == runs / STRANGER / "digits"
    (strangers / "config.yaml").write_text("name: digits\n")
    (strangers / "code").mkdir()
    (strangers / "result.json").write_text(json.dumps({"state": "failed", "attempts": 1}))
    done = site.box.run(["toolkit", "resume", str(strangers)], env=path, check=False)
    assert done.returncode == 2
    assert f"{strangers} belongs to {STRANGER}" in done.stderr
    assert "--trust" in done.stderr
    assert (strangers / "result.json").exists()

    runs.chmod(0o777)  # now anybody could put another folder in the place of a run's
    for user in (None, STRANGER):
        done = site.box.run(["python", "-c", NEW], env=path, user=user, check=False)
        assert done.returncode != 0
        assert f"others may write into {runs} (mode 0777)" in done.stderr or f"{runs} belongs" in done.stderr
