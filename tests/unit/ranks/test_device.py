"""The ranks agree on backend and devices before a group is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import Store, TCPStore

from toolkit.base.errors import ConfigError
from toolkit.devices import accelerator
from toolkit.devices.kinds import CUDA, ROCM
from toolkit.ranks import device, older_torch


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
    said = on_ranks(store, 2, lambda store, rank: device.agree(store, rank, 2, "gloo", gpus=4))
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
        device.agree(store, 0, 1, "nccl", gpus=0)
    device.agree(store, 0, 1, "gloo", gpus=0)


def test_one_node_without_gpus_is_named_on_all_ranks_before_a_group_opens(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    backends = ["nccl", "nccl", "gloo", "nccl"]
    said = on_ranks(store, 4, lambda store, rank: device.agree(store, rank, 4, backends[rank], gpus=1))
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
        device.agree(store, rank, 3, backend, gpus=1)

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
    assert on_ranks(store, 3, lambda store, rank: device.agree(store, rank, 3, "gloo", gpus=0)) == [None] * 3


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
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, visible: list[str], chosen: list[int]
) -> None:
    def choose(store: Store, rank: int) -> int:
        return device.turn(store, rank, 4, list(visible[rank]))

    assert on_ranks(store, 4, choose) == chosen


def test_a_rank_without_a_gpu_of_its_own_is_refused_over_nccl_alone(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "built_for", lambda: CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(accelerator, "identities", lambda count: ["a", "b"])
    chosen = on_ranks(store, 3, lambda store, rank: device.choose_device(store, "gloo", rank, 3).index)
    assert chosen == [0, 1, 0]
    said = on_ranks(store, 3, lambda store, rank: device.choose_device(store, "nccl", rank, 3).index)
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
    found = on_ranks(store, 4, lambda store, rank: device.choose_device(store, "gloo", rank, 4, each).index)
    assert found == chosen
