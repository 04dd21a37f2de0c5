"""The store host as the supervisor starts it: its connections, and those of a rank."""

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest
from torch.distributed import TCPStore

from tests.waiting import PATIENCE
from toolkit.files import rundir
from toolkit.nodes.agent import reports
from toolkit.nodes.start import launcher
from toolkit.plugins.mpi.srun_launcher import StoreHost

pytestmark = pytest.mark.dist
TIMEOUT = timedelta(seconds=30 * PATIENCE)


@contextmanager
def soft_limit(files: int) -> Iterator[None]:
    """For the processes that are started inside."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_store_host_with_a_low_soft_limit_serves_what_the_hard_limit_allows(tmp_path: Path) -> None:
    # This process needs files of its own to start another one, and may hold many after other tests.
    files = max(128, len([*Path("/proc/self/fd").iterdir()]) + 32)
    ranks = max(60, files // launcher.CONNECTIONS_A_RANK + 1)
    with soft_limit(files):
        host = StoreHost(ranks, "127.0.0.1", os.environ, SimpleQueue(), tmp_path / "store.log")
    try:
        clients = [
            TCPStore("127.0.0.1", host.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
            for _ in range(ranks * launcher.CONNECTIONS_A_RANK)
        ]
        for client in clients:
            client.add("count", 1)  # unlike set, it waits for an answer
        assert clients[0].add("count", 0) == len(clients)
    finally:
        host.close()


SESSION = """
import os
from pathlib import Path
from toolkit.config import DistConfig
from toolkit.ranks.session import open_session

with open_session(DistConfig()) as session:
    session.store.set("seen", "1")
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    lines += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    port = int(os.environ["MASTER_PORT"])
    print(sum(line[9] in mine and int(line[2].rpartition(":")[2], 16) == port for line in lines))
"""


def test_a_rank_has_no_more_connections_than_are_reckoned_with(tmp_path: Path) -> None:
    run = rundir.create("test", tmp_path)
    host = StoreHost(1, "127.0.0.1", os.environ, SimpleQueue(), tmp_path / "store.log")
    environ = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TOOLKIT_SUPERVISED": "1",
        reports.VARIABLE: secrets.token_hex(16),
        rundir.RUN_DIR_VARIABLE: str(run.path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", SESSION], env=environ, capture_output=True, text=True, timeout=PATIENCE * 60
        )
        assert done.returncode == 0, done.stderr
        # the process group's, the watcher's, and one for requests
        assert int(done.stdout) == 3
    finally:
        host.close()
    saves, nccl, calls = 1, 1, 1  # a clone of each, where there are background saves, NCCL and a user's loop
    assert int(done.stdout) + saves + nccl + calls <= launcher.CONNECTIONS_A_RANK
