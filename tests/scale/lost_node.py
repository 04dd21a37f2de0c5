"""The end of an attempt that lost one of its nodes, by the real supervisor.

It is measured from srun's first message to the verdict.
"""

import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from tests.scale import Curve
from tests.unit.run.test_supervisor import Ranks
from toolkit import config as configs
from toolkit.base import fsio, process_limits
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import NodeFailed, RanksExited
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job import slurm_job
from toolkit.run.supervise import attempt_loop, supervisor

RANKS_A_NODE = 8


def end(nodes: int) -> Mapping[str, float]:
    def dies(ranks: Ranks) -> None:
        # The dead node's ranks never report an exit; all others are killed with it.
        ranks.answers_kill = False
        ranks.events.put(NodeFailed("node1"))
        for node in range(nodes):
            if node != 1:
                gone = tuple(range(node * RANKS_A_NODE, (node + 1) * RANKS_A_NODE))
                ranks.events.put(RanksExited(gone, f"node{node}", "killed by SIGKILL", signal.SIGKILL, time.time()))

    process_limits.override(error_reports_s=0.01)
    config, slurm = JobConfig(), FakeSlurm()
    config.cluster.preflight = False
    config.data.global_batch_size = nodes * RANKS_A_NODE
    slurm.start(slurm.sbatch(["job.sh"]), f"node[0-{nodes - 1}]")
    hosts = tuple(f"node{node}" for node in range(nodes))
    allocation = Allocation(hosts, (RANKS_A_NODE,) * nodes, 1, job_id="1")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(supervisor, "refuse_too_many_ranks"),
        patch.object(slurm_job, "unreachable", lambda hosts, port, here, timeout_s: set()),
        patch.object(attempt_loop.log, "error"),
    ):
        run = rundir.create("scale", Path(folder))
        fsio.write_atomic(run.config, configs.dump_config(config))
        # The supervisor leaves its signal handlers behind, and this process continues.
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCONT)}
        code = supervisor.Supervisor(run, config, allocation, Ranks(dies), slurm).run()
        for number, handler in before.items():
            signal.signal(number, handler)
        (line,) = run.attempts()
    return {"exit code": code, "lost to a node": int(line.cause == "node_failure")}


CURVES = [Curve("lost node", "nodes", (1000, 4096, 10_000), end)]
