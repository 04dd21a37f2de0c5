"""A store that rank 0 hosts is reached on the address of its ranks only."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from tests.waiting import wait_for
from toolkit.base.errors import ToolkitError
from toolkit.files import rundir
from toolkit.ranks import session

TIMEOUT = timedelta(seconds=20)


def refuses(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_rank_that_is_alone_listens_on_the_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    store = session.open_store(0, 1, TIMEOUT, tmp_path)
    assert isinstance(store, TCPStore)
    assert (refuses("127.0.0.1", store.port), refuses("127.0.0.2", store.port)) == (False, True)


def test_rank_0_without_a_supervisor_listens_where_the_others_are_told_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends use torch's own store and clients."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    told = {}

    def join() -> bytes:
        wait_for((tmp_path / "launch.json").exists, 20, "rank 0's address")
        told.update(json.loads((tmp_path / "launch.json").read_text()))
        store = session.open_store(1, 2, TIMEOUT, tmp_path, lambda: "launch")
        return bytes(store.get("word"))

    with ThreadPoolExecutor() as pool:
        joined = pool.submit(join)
        store = session.open_store(0, 2, TIMEOUT, tmp_path, lambda: "launch")
        store.set("word", "of rank 0")
        assert joined.result(TIMEOUT.total_seconds()) == b"of rank 0"
    assert told["host"] == "127.0.0.1"
    # a listener on all addresses would accept this one
    assert refuses("127.0.0.2", told["port"])


@pytest.mark.parametrize("strangers", ["not there", "open to all"])
def test_no_rank_follows_into_a_folder_that_a_stranger_may_have_named(
    strangers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a supervisor the other ranks learn the run's folder from the store.

    Any process that reaches it may write there.
    """
    monkeypatch.delenv(rundir.RUN_DIR_VARIABLE, raising=False)
    kv, place = HashStore(), tmp_path / "run"
    kv.set("toolkit/run_dir", str(place))
    if strangers == "open to all":
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(ToolkitError, match=rf"rank 1: .*{place}"):
        session._agree_on_run_dir(kv, 1)
    place.mkdir(exist_ok=True)
    place.chmod(0o700)
    assert session._agree_on_run_dir(kv, 1) == place
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(tmp_path))  # a supervisor's word counts
    assert session._agree_on_run_dir(kv, 1) == tmp_path
