"""Which device a collective's tensors travel on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.base import torch_version
from toolkit.ranks import collectives


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
