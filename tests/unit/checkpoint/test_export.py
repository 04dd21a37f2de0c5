"""Exported weights are read by safetensors, torch and torch's DCP themselves, bit for bit."""

import errno
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.file_operations import file_operations
from tests.unit.checkpoint.ranks import alone, save_on
from toolkit.base.errors import CheckpointError, RequestError
from toolkit.checkpoint import tensors, whole
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import CorruptCheckpointError
from toolkit.checkpoint.whole import export
from toolkit.ranks.state import Entry, PerRank, Replicated, Sharded, State

FORMS = {"safetensors": "out.safetensors", "torch": "out.pt", "dcp": "out"}


class Tied(nn.Module):
    """A model with two names for one weight, a buffer and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def entries(model: nn.Module) -> State:
    return {
        **{f"model/{name}": Replicated(value) for name, value in model.state_dict().items()},
        "optim/head.bias/momentum_buffer": Replicated(torch.randn(7)),
        "optim/head.bias/step": Replicated(3),
        "residual/rank0": PerRank(torch.ones(2)),
    }


def read_back(path: Path, form: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read an export with the format's own reader."""
    if form == "safetensors":
        return load_file(path)
    if form == "torch":
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found
    into = {name: torch.zeros_like(value) for name, value in like.items()}
    dcp.load(into, checkpoint_id=path)
    return into


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def exported(folder: Path, form: str, *, everything: bool = False) -> Path:
    (path,) = CheckpointFolder(folder / "checkpoints").list()
    target = folder / FORMS[form]
    manifest = CheckpointFolder(path.parent).manifest(path)
    export(path, manifest, target, form, run="20260102-030405-abcd", everything=everything)
    return target


def test_the_average_is_exported_if_there_is_one_unless_raw_weights_are_requested(tmp_path: Path) -> None:
    """A run's figures, `keep_best` and `toolkit export` all use the average."""
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    plain, both = ({"model/w": Replicated(torch.zeros(2))}, {"ema/w": Replicated(torch.ones(2))})
    for step, state in ((100, plain), (200, plain | both)):
        alone(checkpoints, step, state)
    newest, older = checkpoints.list()
    found = {}
    for path, weights in ((newest, None), (newest, "average"), (newest, "raw"), (older, None)):
        target = tmp_path / f"{path.name}-{weights}.safetensors"
        count, chosen = export(path, checkpoints.manifest(path), target, "safetensors", run="this one", weights=weights)
        with safe_open(target, "pt") as file:
            assert (count, file.metadata()["weights"]) == (1, chosen)
        found[path.name, weights] = chosen, load_file(target)["w"].sum().item()
    average, raw = ("average", 2.0), ("raw", 0.0)
    assert [*found.values()] == [average, average, raw, raw]
    with pytest.raises(RequestError, match="there is no moving average of the model's weights"):
        export(older, checkpoints.manifest(older), tmp_path / "x.pt", "torch", run="this one", weights="average")


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_loaded_from_its_export(tmp_path: Path, form: str) -> None:
    model = Tied()
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(model))
    expected = model.state_dict()
    found = read_back(exported(tmp_path, form), form, expected)
    assert same(found, expected)
    fresh = Tied()
    fresh.load_state_dict(found)
    assert same(fresh.state_dict(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
@pytest.mark.parametrize("form", FORMS)
def test_what_ranks_shared_is_whole_again(tmp_path: Path, form: str) -> None:
    rows, columns = torch.arange(20.0).reshape(5, 4), torch.arange(12).reshape(2, 6)

    states: list[State] = [
        {
            "model/rows": Sharded(rows[a:b].clone(), (5, 4), (a, 0)),
            "model/columns": Sharded(columns[:, left : left + 2].clone(), (2, 6), (0, left)),
        }
        for a, b, left in ((0, 1, 0), (1, 1, 2), (1, 5, 4))
    ]
    assert len(set(save_on(tmp_path / "checkpoints", states))) == 1
    expected = {"rows": rows, "columns": columns}
    assert same(read_back(exported(tmp_path, form), form, expected), expected)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_all_tensors_come_under_the_checkpoints_names(tmp_path: Path, form: str) -> None:
    state = entries(Tied())
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, state)
    tensors = {name: entry.value for name, entry in state.items() if isinstance(entry.value, Tensor)}
    target = exported(tmp_path, form, everything=True)
    found = read_back(target, form, tensors)
    if form == "torch":
        assert found.pop("optim/head.bias/step") == 3
    assert same(found, tensors)
    if form == "safetensors":
        with safe_open(target, "pt") as file:
            assert json.loads(file.metadata()["values"]) == {"optim/head.bias/step": 3}


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_torchs_recipe_for_dcp_finds_model_and_optimizer_in_all_tensors(tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, fresh)]
    model(torch.randn(8, 4)).square().sum().backward()
    optimizers[0].step()
    state: dict[str, Entry] = {f"model/{name}": Replicated(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        slots = optimizers[0].state[parameter]
        state |= {f"optim/{name}/{slot}": Replicated(value) for slot, value in slots.items()}
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, {**state, "loop/order": Replicated(torch.arange(3))})
    weights, optimizer = get_state_dict(fresh, optimizers[1])
    into: dict[str, Any] = {"model": weights, "optim": optimizer}
    # The rates and the like of an optimizer are the script's own, and no tensors.
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, checkpoint_id=exported(tmp_path, "dcp", everything=True), planner=partial)
    set_state_dict(fresh, optimizers[1], model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert same(fresh.state_dict(), model.state_dict())
    for mine, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert same(mine, other)


def test_safetensors_say_which_step_of_which_run_they_are(tmp_path: Path) -> None:
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(Tied()))
    with safe_open(exported(tmp_path, "safetensors"), "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt"
    assert (about["step"], about["run"], about["torch"]) == ("200", "20260102-030405-abcd", torch.__version__)
    assert "values" not in about


def test_every_type_that_safetensors_has_comes_back_bit_for_bit_and_aligned(tmp_path: Path) -> None:
    state: dict[str, Entry] = {}
    for dtype in tensors.TYPES:
        name = str(dtype).removeprefix("torch.")
        # random bytes may be NaNs, so the bits are compared below and not the values
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (3 * dtype.itemsize,), dtype=torch.uint8)
        state[f"model/{name}"] = Replicated(bits.view(dtype))
        state[f"model/{name}/empty"] = Replicated(torch.empty(0, 3, dtype=dtype))
        state[f"model/{name}/scalar"] = Replicated(bits.view(dtype)[0].clone())
    alone(CheckpointFolder(tmp_path / "checkpoints"), 1, state)
    found = load_file(exported(tmp_path, "safetensors"))
    assert len(found) == len(state)
    for name, value in found.items():
        expected = state[f"model/{name}"].value
        assert isinstance(expected, Tensor)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert value.data_ptr() % value.element_size() == 0
        if value.numel():
            assert torch.equal(value.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name


def test_a_type_that_safetensors_has_not_is_refused_by_name(tmp_path: Path) -> None:
    state = {"model/w": Replicated(torch.ones(2, dtype=torch.complex128))}
    alone(CheckpointFolder(tmp_path / "checkpoints"), 1, state)
    with pytest.raises(CheckpointError, match="w is of type complex128, which safetensors does not support"):
        exported(tmp_path, "safetensors")


def test_a_state_without_a_model_is_refused_saying_what_there_is(tmp_path: Path) -> None:
    alone(CheckpointFolder(tmp_path / "checkpoints"), 1, {"net/w": Replicated(torch.ones(2))})
    with pytest.raises(CheckpointError, match=r"has no tensors named model/\.\.\., see --all; there are: net/w"):
        exported(tmp_path, "torch")


def test_safetensors_are_written_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"model/{i}": Replicated(torch.full((4,), float(i))) for i in range(9)}
    alone(CheckpointFolder(tmp_path / "checkpoints"), 1, state)
    seen, most, plain = list[Callable[[], Tensor | None]](), list[int](), whole.read

    def read(*args: object) -> Tensor:
        most.append(sum(ref() is not None for ref in seen))
        found = plain(*args)  # type: ignore[arg-type]
        seen.append(weakref.ref(found))
        return found

    monkeypatch.setattr(whole, "read", read)
    exported(tmp_path, "safetensors")
    assert len(seen) == 9
    assert max(most) <= 1  # the one that has just been written


@pytest.mark.parametrize("form", FORMS)
def test_of_a_damaged_checkpoint_nothing_is_exported(tmp_path: Path, form: str) -> None:
    path = alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(Tied()))
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-40] + bytes(40))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        exported(tmp_path, form, everything=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, form: str) -> None:
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(Tied()))
    before = sorted(tmp_path.iterdir())

    def full(operation: str, path: str) -> None:
        if operation == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with file_operations(full), pytest.raises(CheckpointError, match="No space left on device"):
        exported(tmp_path, form)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", FORMS)
def test_what_is_there_is_not_overwritten(tmp_path: Path, form: str) -> None:
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(Tied()))
    (tmp_path / FORMS[form]).write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        exported(tmp_path, form)
    assert (tmp_path / FORMS[form]).read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_a_type_that_this_torch_has_not_is_named(tmp_path: Path) -> None:
    alone(CheckpointFolder(tmp_path / "checkpoints"), 200, entries(Tied()))
    (path,) = CheckpointFolder(tmp_path / "checkpoints").list()
    record = CheckpointFolder(path.parent).manifest(path).tensors["model/head.bias"]
    object.__setattr__(record, "dtype", "save")
    with pytest.raises(CheckpointError, match=r"model/head\.bias is of type save, which torch"):
        whole.read(path, "model/head.bias", record)
