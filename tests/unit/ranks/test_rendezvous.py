"""A store that rank 0 hosts is reached on the address of its ranks only."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore, Store, TCPStore

from tests.waiting import wait_for
from toolkit.base import torch_version
from toolkit.base.errors import ConfigError, ToolkitError
from toolkit.devices import accelerator
from toolkit.devices.kinds import CUDA, ROCM
from toolkit.files import rundir
from toolkit.ranks import collectives, device, older_torch, session

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


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)


def on_ranks(store: TCPStore, count: int, call: Callable[[Store, int], Any]) -> list[Any]:
    """Return what ``call`` returns on each rank, or its ConfigError as text. Each has a client of its own."""

    def one(rank: int) -> Any:
        try:
            return call(older_torch.clone(store), rank)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_gpus_that_torch_does_not_see_are_missed_on_all_ranks(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = on_ranks(store, 2, lambda store, rank: device.agree_on_backend(store, rank, 2, "gloo", gpus=4))
    assert said[0] == said[1]
    for words in (
        "cluster.gpus_per_node asks for 4 GPUs",
        torch.__version__,
        "the node has ",
        "cluster.gpus_per_node=0",
    ):
        assert words in said[0]
    assert "CUDA_VISIBLE_DEVICES=''" in said[0]


def test_a_rank_alone_is_refused_as_well(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    with pytest.raises(ConfigError, match=r"dist\.backend: nccl needs GPUs, and torch .* sees none"):
        device.agree_on_backend(store, 0, 1, "nccl", gpus=0)
    device.agree_on_backend(store, 0, 1, "gloo", gpus=0)


def test_one_node_without_gpus_is_named_on_all_ranks_before_a_group_opens(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    backends = ["nccl", "nccl", "gloo", "nccl"]
    said = on_ranks(store, 4, lambda store, rank: device.agree_on_backend(store, rank, 4, backends[rank], gpus=1))
    assert len({*said}) == 1
    assert said[0].startswith("rank 2 on ")
    assert "would use gloo" in said[0]
    assert "rank 0 uses nccl" in said[0]


@pytest.mark.parametrize(("backend", "is_refused"), [("nccl", True), ("gloo", False), ("mpi", False)])
def test_two_kinds_of_devices_meet_over_gloo_alone(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, backend: str, is_refused: bool
) -> None:
    """ROCm's torch opens a group of the same name, nccl, which is another library."""
    own = threading.local()
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    monkeypatch.setattr(accelerator, "kind", lambda: own.kind)

    def agree(store: Store, rank: int) -> None:
        own.kind = ROCM if rank == 1 else CUDA
        device.agree_on_backend(store, rank, 3, backend, gpus=1)

    said = on_ranks(store, 3, agree)
    if not is_refused:
        assert said == [None] * 3
        return
    assert len({*said}) == 1
    assert said[0].startswith("rank 1 on ")
    assert "has ROCm" in said[0]
    assert "rank 0 has CUDA" in said[0]
    assert "dist.backend=gloo" in said[0]


def test_ranks_of_one_kind_agree(store: TCPStore) -> None:
    assert on_ranks(store, 3, lambda store, rank: device.agree_on_backend(store, rank, 3, "gloo", gpus=0)) == [None] * 3


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (["abcd"] * 4, [0, 1, 2, 3]),  # Slurm hides nothing
        (["a", "b", "c", "d"], [0, 0, 0, 0]),  # --gpus-per-task=1
        (["ab", "ab", "cd", "cd"], [0, 1, 0, 1]),  # --gpu-bind=closest, tasks block by block
        (["ab", "cd", "ab", "cd"], [0, 0, 1, 1]),  # and in turn
    ],
)
def test_ranks_share_out_the_gpus_that_slurm_lets_them_see(
    store: TCPStore, visible: list[str], chosen: list[int]
) -> None:
    def choose(store: Store, rank: int) -> int:
        return device.choose_gpu_index(store, rank, 4, list(visible[rank]))

    assert on_ranks(store, 4, choose) == chosen


def test_a_rank_without_a_gpu_of_its_own_is_refused_over_nccl_alone(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "built_for", lambda: CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(accelerator, "identities", lambda count: ["a", "b"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    chosen = on_ranks(store, 3, lambda store, rank: device.choose_device(store, "gloo", rank).index)
    assert chosen == [0, 1, 0]
    said = on_ranks(store, 3, lambda store, rank: device.choose_device(store, "nccl", rank).index)
    assert said[:2] == [0, 1]
    assert "local rank 2 of 3" in said[2]
    assert "--gpu-bind" in said[2]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (["a", "b"], [0, 0, 1, 1]),  # of a launcher that shows each rank all GPUs
        (["a"], [0, 0, 0, 0]),  # an agent shows each rank its own, which four share here
    ],
)
def test_neighbouring_ranks_share_a_gpu_over_gloo(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, visible: list[str], chosen: list[int]
) -> None:
    monkeypatch.setattr(accelerator, "built_for", lambda: CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(accelerator, "identities", lambda count: visible)
    each = 4 // len(visible)
    assert (device.choose_backend("auto"), device.choose_backend("auto", each)) == ("nccl", "gloo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = on_ranks(store, 4, lambda store, rank: device.choose_device(store, "gloo", rank, each).index)
    assert found == chosen


@pytest.mark.parametrize(("served", "where"), [(["cpu"], "cpu"), (["cuda"], "cuda"), (["cuda", "cpu"], "cpu")])
def test_offloaded_values_are_summed_by_a_group_that_serves_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, served: list[str], where: str
) -> None:
    """NCCL's group says "No backend type associated with device type cpu". torch's fake tensors stand for the GPU's."""
    if "cpu" not in served and torch_version.is_before((2, 11)) and not torch.cuda.is_available():
        pytest.skip("without a GPU, fake tensors of torch before 2.11 ask CUDA's driver")
    sent: list[str] = []

    def gather(rows: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        sent.extend((rows.device.type, part.device.type))

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    group: Any = SimpleNamespace(_device_types=[torch.device(kind) for kind in served])
    with FakeTensorMode():
        total = collectives.sum_in_order(torch.zeros(3), group)
    assert sent == [where, where]
    assert total.device.type == "cpu"
