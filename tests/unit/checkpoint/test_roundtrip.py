"""Every value comes back bit for bit; the oracle is torch.equal."""

import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import alone, load_alone, on_ranks, tensor_of, weights
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.whole import export
from toolkit.checkpoint.writer import Staging, save
from toolkit.ranks.state import PerRank, Replicated, Sharded, State


def dense_dtypes() -> list[torch.dtype]:
    """Return this torch's dtypes whose dense tensors can be made and seen as bytes."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            tensor = torch.empty(2, dtype=dtype)
            tensor.view(torch.uint8)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if not tensor.is_quantized:
            found.append(dtype)
    return sorted(found, key=str)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any bit pattern, NaNs included (0 or 1 for bool)."""
    template = torch.empty(shape, dtype=dtype)
    high = 2 if dtype is torch.bool else 256
    size = template.numel() * template.element_size()
    return torch.randint(0, high, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(flat_a, flat_b)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of its types experimental
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    saved = {f"{dtype}/{shape}": random_bits(dtype, shape) for dtype in dense_dtypes() for shape in shapes}
    assert {"torch.bfloat16/()", "torch.bool/(5,)", "torch.complex64/(5,)", "torch.float8_e4m3fn/(5,)"} <= saved.keys()
    alone(checkpoints, 1, {name: Replicated(tensor) for name, tensor in saved.items()})
    live = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
    assert load_alone(checkpoints, {name: Replicated(tensor) for name, tensor in live.items()})
    assert [name for name in saved if not same_bits(saved[name], live[name])] == []


def test_views_parameters_and_lazy_conjugates_come_back_equal(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    base = torch.randn(6, 4)
    saved = {
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "parameter": torch.nn.Parameter(base.clone()),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "one_element": torch.randn(4)[::4],  # contiguous, with a stride of 4
        "empty": torch.randn(4)[::2][:0],
    }
    staged, _ = Staging().copy({name: Replicated(tensor) for name, tensor in saved.items()}, 0)
    assert [name for name in saved if not torch.equal(saved[name], staged[name].value)] == []  # type: ignore[arg-type]
    alone(checkpoints, 1, {name: Replicated(tensor) for name, tensor in saved.items()})
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    live["one_element"] = torch.zeros(4)[::4]
    live["transposed"] = torch.zeros(6, 4).t()  # not contiguous on the way in either
    live["parameter"] = torch.nn.Parameter(torch.zeros(6, 4))
    load_alone(checkpoints, {name: Replicated(tensor) for name, tensor in live.items()})
    assert [name for name in saved if not torch.equal(saved[name], live[name])] == []


def test_meta_and_values_come_back_as_json(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    state = {
        "optim/groups": Replicated([{"lr": 0.1, "betas": [0.9, 0.95], "name": "é"}]),
        "model/w": Replicated(torch.ones(1)),
    }
    path = alone(checkpoints, 7, state, epoch=2, note=None)
    loaded = load_alone(checkpoints, state)
    assert loaded
    assert (loaded.step, loaded.path, loaded.skipped) == (7, path, {})
    assert loaded.meta == {"epoch": 2, "note": None}
    assert loaded.values == {"optim/groups": [{"lr": 0.1, "betas": [0.9, 0.95], "name": "é"}]}


def test_no_checkpoint_gives_none_and_leaves_the_state_alone(tmp_path: Path) -> None:
    state = weights(3.0)
    assert load_alone(CheckpointFolder(tmp_path / "never made"), state) is None
    assert torch.equal(tensor_of(state["model/weight"]), torch.full((3, 4), 3.0))


def test_shards_and_per_rank_values_of_three_ranks_come_back(tmp_path: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    rows = [(0, 1), (1, 3), (3, 5)]

    def state(rank: int, source: torch.Tensor) -> State:
        start, stop = rows[rank]
        return {
            "model/w": Sharded(source[start:stop].clone(), (5, 2), (start, 0)),
            # only what is saved has values: a live state starts with zeros
            f"residual/rank{rank}": PerRank(torch.full((2,), float(rank)) * (source is whole)),
            f"counter/rank{rank}": PerRank(rank),
            "bias": Replicated(torch.ones(2) * (source is whole)),
        }

    def run(rank: int, kv: HashStore) -> tuple[State, object]:
        checkpoints = CheckpointFolder(tmp_path)
        save(checkpoints, 5, state(rank, whole), {}, rank=rank, world_size=3, kv=kv)
        live = state(rank, torch.zeros(5, 2))
        return live, load(checkpoints, live, rank=rank, world_size=3, kv=kv)

    for rank, (live, loaded) in enumerate(on_ranks(3, run)):
        for name, entry in state(rank, whole).items():
            if isinstance(entry.value, torch.Tensor):
                assert torch.equal(tensor_of(live[name]), entry.value), name
        assert loaded.values == {f"counter/rank{rank}": rank}


def test_folders_are_0700_and_files_0600(tmp_path: Path) -> None:
    path = alone(CheckpointFolder(tmp_path / "checkpoints"), 1, weights(1.0))
    modes = {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("live", "complaint"),
    [
        ({"a": Replicated(torch.zeros(3))}, r"a is float32 \(2,\) in the checkpoint and float32 \(3,\) here"),
        ({"a": Replicated(torch.zeros(2, dtype=torch.int32))}, r"float32 \(2,\) in the checkpoint and int32"),
        ({"b": Replicated(torch.zeros(2))}, "b is not in the checkpoint, a is only in the checkpoint"),
        ({"a": PerRank(torch.zeros(2))}, "a is replicated in the checkpoint and per_rank here"),
        ({"a": Replicated(1)}, "a is a tensor only in the checkpoint"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error_and_no_older_one_is_tried(
    tmp_path: Path, live: State, complaint: str
) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2):
        alone(checkpoints, step, {"a": Replicated(torch.ones(2))})
    with pytest.raises(CheckpointError, match=complaint):
        load_alone(checkpoints, live)
    assert len(checkpoints.list()) == 2


def test_a_sparse_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"embedding\.grad is a sparse tensor \(torch\.sparse_coo\)"):
        alone(CheckpointFolder(tmp_path), 1, {"embedding.grad": Replicated(torch.eye(3).to_sparse())})


@pytest.mark.parametrize("value", [{1, 2}, [torch.ones(2)]])
def test_a_value_that_is_not_json_is_refused_and_nothing_is_left(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="only JSON is stored next to tensors, and odd is not"):
        alone(CheckpointFolder(tmp_path), 1, {"plain": Replicated(1), "odd": Replicated(value)})
    assert list(tmp_path.iterdir()) == []


def test_a_load_up_to_a_step_may_take_that_very_step(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, Keep(5))
    for step in (100, 200, 300):
        alone(checkpoints, step, weights(float(step)))
    for newest, step in ((299, 200), (200, 200), (199, 100)):
        assert load_alone(checkpoints, weights(0.0), newest=newest).step == step


GOLDEN = [Path(__file__).parent / f"format-{number}" for number in (1, 2)]
#: What rank 0 and rank 1 saved in step 42, written down without torch: bits where numpy has no such type.
WEIGHT = np.array([[1.5, -0.0, 3e-45], [np.inf, 1 / 3, -7.25]], np.float32)
BFLOAT16_BITS = np.array([0x3F80, 0xC2F7, 0x7FC1, 0x0001], np.uint16)  # 1.0, -123.5, a NaN with a payload, the least
FLOAT8_BITS = np.array([0x38, 0xFF, 0x01], np.uint8)
SHARDED = np.arange(15, dtype=np.float64).reshape(5, 3) / 7
ROWS = (slice(0, 2), slice(2, 5))


def state(rank: int) -> State:
    """Return what the golden checkpoints were saved from."""
    return {
        "model/weight": Replicated(torch.from_numpy(WEIGHT.copy())),
        "model/half": Replicated(torch.from_numpy(BFLOAT16_BITS.copy()).view(torch.bfloat16)),
        "model/eighth": Replicated(torch.from_numpy(FLOAT8_BITS.copy()).view(torch.float8_e4m3fn)),
        "model/mask": Replicated(torch.tensor([True, False, True])),
        "model/seen": Replicated(torch.tensor(1 << 40)),
        "model/empty": Replicated(torch.empty(0, 4, dtype=torch.int16)),
        "optim/weight/betas": Replicated([0.9, 0.95]),
        "model/shards": Sharded(torch.from_numpy(SHARDED[ROWS[rank]].copy()), (5, 3), (ROWS[rank].start, 0)),
        f"residual/rank{rank}": PerRank(torch.tensor([rank + 1j, -2j])),
        f"stream/rank{rank}": PerRank({"position": 7 + rank, "name": "é", "rest": None}),
    }


def zeroed(rank: int) -> State:
    found = state(rank)
    for entry in found.values():
        if isinstance(entry.value, torch.Tensor):
            entry.value.zero_()
    return found


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_each_format_is_read_bit_for_bit(golden: Path) -> None:
    def read(rank: int, kv: HashStore) -> tuple[Loaded, State]:
        live = zeroed(rank)
        found = load(CheckpointFolder(golden), live, rank=rank, world_size=2, kv=kv, read_only=True)
        assert found
        return found, live

    for rank, (loaded, live) in enumerate(on_ranks(2, read)):
        for name, entry in state(rank).items():
            if isinstance(entry.value, torch.Tensor):
                assert bits(tensor_of(live[name])) == bits(entry.value), name
        assert (loaded.step, loaded.skipped) == (42, {})
        assert loaded.meta == {
            "identity": {"model.name": "mlp"},
            "samples": 2688,
            "metrics": {"eval/accuracy": 0.5},
            "evaluated": None,
        }
        assert loaded.values == {
            "optim/weight/betas": [0.9, 0.95],
            f"stream/rank{rank}": {"position": 7 + rank, "name": "é", "rest": None},
        }


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_each_format_is_verified_and_exported(golden: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(golden)
    (path,) = checkpoints.list()
    target = tmp_path / "all.safetensors"
    export(path, checkpoints.verify(path), target, "safetensors", run="this one", everything=True)
    exported = load_file(target)
    expected = {**state(0), **state(1), "model/shards": Replicated(torch.from_numpy(SHARDED.copy()))}
    values = {name: entry.value for name, entry in expected.items() if isinstance(entry.value, torch.Tensor)}
    assert exported.keys() == values.keys()
    assert [name for name, value in values.items() if bits(value) != bits(exported[name])] == []


def test_a_run_goes_on_from_a_checkpoint_of_format_1_in_the_newest_format(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN[0], tmp_path / "run")

    def resume(rank: int, kv: HashStore) -> Path:
        checkpoints, live = CheckpointFolder(tmp_path / "run", Keep(2)), zeroed(rank)
        assert load(checkpoints, live, rank=rank, world_size=2, kv=kv, read_only=True)
        return save(checkpoints, 43, live, {}, rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, resume) == [tmp_path / "run/step-00000043"] * 2
    newest, oldest = map(manifests.read, CheckpointFolder(tmp_path / "run").list())
    assert [*newest.files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [*oldest.files] == ["rank-00000.bin", "rank-00001.bin"]
    for name, record in oldest.tensors.items():
        assert [part.crc32 for part in newest.tensors[name].parts] == [part.crc32 for part in record.parts], name
