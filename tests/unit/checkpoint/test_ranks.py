"""Ranks as threads around torch's HashStore: all return the same or all raise the same."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import on_ranks, tensor_of, weights
from toolkit.base.errors import CheckpointError, UnsavableStateError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, file_errors
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.writer import save
from toolkit.ranks.state import PerRank, Replicated, Sharded, State


def own(rank: int, value: float = 0.0) -> State:
    return {**weights(value), f"own/rank{rank}": PerRank(torch.full((4,), value + rank))}


def messages(outcomes: list[object]) -> list[str]:
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


def test_two_ranks_save_and_both_get_the_path(tmp_path: Path) -> None:
    paths = on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, own(r), {}, rank=r, world_size=2, kv=kv))
    assert paths == [tmp_path / "step-00000003"] * 2
    names = sorted(p.name for p in paths[0].iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_at_a_resume_rank_0_alone_looks_at_the_files_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of 1,000 ranks looked at 1,000 files, twice."""
    on_ranks(3, lambda r, kv: save(CheckpointFolder(tmp_path), 3, own(r), {}, rank=r, world_size=3, kv=kv))
    looked = list[int]()
    plain = manifests.check_sizes
    monkeypatch.setattr(manifests, "check_sizes", lambda *of: looked.append(1) or plain(*of))
    found = on_ranks(3, lambda r, kv: load(CheckpointFolder(tmp_path), own(r), rank=r, world_size=3, kv=kv))
    assert [getattr(loaded, "step", loaded) for loaded in found] == [3, 3, 3]
    assert len(looked) == 1


def test_a_rank_that_holds_only_replicas_writes_no_file(tmp_path: Path) -> None:
    on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, weights(1.0), {}, rank=r, world_size=2, kv=kv))
    assert sorted(p.name for p in (tmp_path / "step-00000003").iterdir()) == ["manifest.json", "rank-00000.safetensors"]


def test_the_store_holds_no_more_keys_after_many_saves_than_after_one(tmp_path: Path) -> None:
    kept = list[int]()

    def run(rank: int, kv: HashStore) -> None:
        checkpoints = CheckpointFolder(tmp_path)
        for step in range(1, 6):
            save(checkpoints, step, own(rank), {}, rank=rank, world_size=2, kv=kv)
            if rank == 0:
                kept.append(kv.num_keys())
        load(checkpoints, own(rank), rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, run) == [None, None]
    assert max(kept) <= kept[0] + 2  # the other rank may have spoken in the next save already


class FullDisk(CheckpointFolder):
    """A folder whose disk is full for the file of one rank."""

    def write(self, path: Path, chunks: Iterable[memoryview]) -> None:
        """Fail as `fsio.write_stream` does."""
        with file_errors("writing", path):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_write_is_reported_to_all(tmp_path: Path, failing: int) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        checkpoints = (FullDisk if rank == failing else CheckpointFolder)(tmp_path)
        return save(checkpoints, 3, own(rank), {}, rank=rank, world_size=3, kv=kv)

    texts = messages(on_ranks(3, run))
    assert len(set(texts)) == 1
    assert f"rank-0000{failing}.safetensors failed (No space left on device)" in texts[0]
    assert "free space there" in texts[0]
    assert failing == 0 or f"rank {failing} on " in texts[0]
    assert CheckpointFolder(tmp_path).list() == []


def test_after_a_failed_save_the_same_ranks_can_save_the_step(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        checkpoints = CheckpointFolder(tmp_path)
        unwritable: Any = object()
        bad = {"w": Replicated(torch.zeros(1)), "x": Replicated(unwritable if rank == 0 else None)}
        with pytest.raises(CheckpointError):
            save(checkpoints, 3, bad, {}, rank=rank, world_size=2, kv=kv)
        return save(checkpoints, 3, own(rank), {}, rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, run) == [tmp_path / "step-00000003"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_silent_ranks_are_named_on_all_ranks_that_wait(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path | None:
        if rank in (1, 3):
            return None
        return save(CheckpointFolder(tmp_path), 3, own(rank), {}, rank=rank, world_size=4, kv=kv, timeout_s=1.0)

    outcomes = on_ranks(4, run)
    texts = messages([outcomes[0], outcomes[2]])
    assert all("no word within 1 s from rank 1, 3" in text for text in texts)


def test_a_rank_that_hears_nothing_from_rank_0_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 heard nothing about its checkpoint from rank 0 for 0\.2 s"):
        save(CheckpointFolder(tmp_path), 3, own(1), {}, rank=1, world_size=2, kv=HashStore(), timeout_s=0.1)


def test_replicas_that_have_drifted_apart_are_named(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        state = {"same": Replicated(torch.ones(2)), "drifted": Replicated(torch.ones(2) * (1 + rank * 1e-7))}
        return save(CheckpointFolder(tmp_path), 3, state, {}, rank=rank, world_size=2, kv=kv)

    outcomes = on_ranks(2, run)
    assert all(isinstance(outcome, UnsavableStateError) for outcome in outcomes)
    text = "drifted declared as replicated, but rank 1 and rank 0 hold different values"
    assert all(text in found for found in messages(outcomes))
    assert list(tmp_path.iterdir()) == []


SAME = torch.arange(1, 31, dtype=torch.float32)


@pytest.mark.parametrize(
    "other",
    [
        torch.cat([torch.zeros(1), SAME])[1:],  # aligned to 4 bytes only
        SAME.view(5, 6).t().contiguous().t().reshape(-1),
        torch.stack([SAME, SAME], 1)[:, 0],  # with a stride
    ],
    ids=["unaligned", "copied", "strided"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64], ids=str)
def test_replicas_may_lie_differently_in_memory(tmp_path: Path, other: torch.Tensor, dtype: torch.dtype) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        state = {"w": Replicated((other if rank else SAME).to(dtype)), "empty": Replicated(torch.zeros(0))}
        return save(CheckpointFolder(tmp_path), 3, state, {}, rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, run) == [tmp_path / "step-00000003"] * 2


@pytest.mark.parametrize("bit", range(32))
def test_a_single_flipped_bit_tells_replicas_apart(tmp_path: Path, bit: int) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        values = SAME[:29].clone()
        values.view(torch.int32)[bit % 29] ^= rank << bit if bit < 31 else -rank << bit
        return save(CheckpointFolder(tmp_path), 3, {"w": Replicated(values)}, {}, rank=rank, world_size=2, kv=kv)

    assert all("w declared as replicated" in text for text in messages(on_ranks(2, run)))


def test_numbers_that_differ_are_no_replicas(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        return save(CheckpointFolder(tmp_path), 3, {"n": Replicated(rank)}, {}, rank=rank, world_size=2, kv=kv)

    assert all("n declared as replicated" in text for text in messages(on_ranks(2, run)))


def test_ranks_with_different_names_are_refused(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        state = {f"w{rank}": Replicated(torch.ones(1))}
        return save(CheckpointFolder(tmp_path), 3, state, {}, rank=rank, world_size=2, kv=kv)

    assert all("rank 1 declares other replicated values" in text for text in messages(on_ranks(2, run)))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({0: (0, 2), 1: (1, 3)}, "overlap or leave a gap"),
        ({0: (0, 1), 1: (2, 3)}, "overlap or leave a gap"),
        ({0: (0, 3), 1: (0, 3)}, "overlap or leave a gap"),
    ],
)
def test_shards_that_do_not_make_up_the_tensor_are_refused(
    tmp_path: Path, parts: dict[int, tuple[int, int]], complaint: str
) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        start, stop = parts[rank]
        state = {"w": Sharded(torch.zeros(stop - start, 2), (3, 2), (start, 0))}
        return save(CheckpointFolder(tmp_path), 3, state, {}, rank=rank, world_size=2, kv=kv)

    assert all(complaint in text for text in messages(on_ranks(2, run)))


def test_two_ranks_with_the_same_per_rank_name_are_refused(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        state = {"residual": PerRank(torch.zeros(2))}
        return save(CheckpointFolder(tmp_path), 3, state, {}, rank=rank, world_size=2, kv=kv)

    assert all("two ranks declare residual as their own" in text for text in messages(on_ranks(2, run)))


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        return save(CheckpointFolder(tmp_path), 3 + rank, own(rank), {}, rank=rank, world_size=2, kv=kv)

    assert "it saves step 4 while rank 0 saves step 3" in messages(on_ranks(2, run))[0]


def test_per_rank_values_are_refused_at_another_world_size(tmp_path: Path) -> None:
    on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, own(r), {}, rank=r, world_size=2, kv=kv))
    with pytest.raises(CheckpointError, match="it holds values of each of 2 ranks, and now there are 1"):
        load(CheckpointFolder(tmp_path), own(0), rank=0, world_size=1, kv=None)


def test_replicated_state_is_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, weights(7.0), {}, rank=r, world_size=2, kv=kv))

    def read(rank: int, kv: HashStore) -> float:
        live = weights(0.0)
        assert load(CheckpointFolder(tmp_path), live, rank=rank, world_size=3, kv=kv)
        return float(tensor_of(live["model/weight"]).mean())

    assert on_ranks(3, read) == [7.0] * 3


def test_a_rank_with_another_model_stops_all_ranks(tmp_path: Path) -> None:
    on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, weights(7.0), {}, rank=r, world_size=2, kv=kv))

    def read(rank: int, kv: HashStore) -> object:
        live = weights(0.0) if rank == 0 else {"model/weight": Replicated(torch.zeros(9))}
        return load(CheckpointFolder(tmp_path), live, rank=rank, world_size=2, kv=kv)

    texts = messages(on_ranks(2, read))
    assert all("does not fit this model and strategy" in text and "rank 1 on" in text for text in texts)


def test_no_checkpoint_is_none_on_all_ranks(tmp_path: Path) -> None:
    def read(rank: int, kv: HashStore) -> object:
        return load(CheckpointFolder(tmp_path), own(rank), rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, read) == [None, None]


def test_a_conversation_of_an_earlier_attempt_in_the_same_store_is_not_heard(tmp_path: Path) -> None:
    kv = HashStore()
    with pytest.raises(CheckpointError, match="no word"):  # attempt 1: rank 1 never comes
        save(CheckpointFolder(tmp_path), 3, own(0), {}, rank=0, world_size=2, kv=kv, timeout_s=0.05)
    with pytest.raises(CheckpointError, match="heard nothing"):  # attempt 2 must not take that error for its own
        save(CheckpointFolder(tmp_path), 3, own(1), {}, rank=1, world_size=2, kv=kv, timeout_s=0.05, attempt=2)


def copies(rank: int, value: float = 1.0) -> State:
    """Return a rank's half of a tensor. Ranks 0 and 1 hold the two halves, ranks 2 and 3 copies of them."""
    half = torch.full((2, 3), value + rank % 2)
    return {"w": Sharded(half, (4, 3), (2 * (rank % 2), 0), is_copy=rank > 1)}


def test_a_part_that_several_ranks_hold_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> torch.Tensor:
        checkpoints = CheckpointFolder(tmp_path)
        save(checkpoints, 3, copies(rank), {}, rank=rank, world_size=4, kv=kv)
        state = copies(rank, 0.0)
        load(checkpoints, state, rank=rank, world_size=4, kv=kv)
        return state["w"].value  # type: ignore[return-value]

    for rank, value in enumerate(on_ranks(4, run)):
        assert torch.equal(value, torch.full((2, 3), 1.0 + rank % 2))
    names = sorted(path.name for path in (tmp_path / "step-00000003").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_copies_of_a_part_that_have_drifted_apart_are_refused_with_name_and_rank(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> None:
        save(CheckpointFolder(tmp_path), 3, copies(rank, 1.0 + (rank == 3)), {}, rank=rank, world_size=4, kv=kv)

    for message in messages(on_ranks(4, run)):
        assert "w: rank 3 holds another value than the rank that writes its part" in message
    assert list(tmp_path.glob("step-*")) == []


def averaged(rank: int, value: float) -> State:
    name = f"residual/rank{rank}/w"
    return {**weights(0.0), name: PerRank(torch.full((2, 3), value + rank), averages=True)}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_averages_starts_from_the_mean_of_all_ranks_at_another_world_size(tmp_path: Path, ranks: int) -> None:
    on_ranks(3, lambda r, kv: save(CheckpointFolder(tmp_path), 3, averaged(r, 1.5), {}, rank=r, world_size=3, kv=kv))

    def run(rank: int, kv: HashStore) -> torch.Tensor:
        state = averaged(rank, 0.0)
        load(CheckpointFolder(tmp_path), state, rank=rank, world_size=ranks, kv=kv)
        return state[f"residual/rank{rank}/w"].value  # type: ignore[return-value]

    assert [found.tolist() for found in on_ranks(ranks, run)] == [[[2.5] * 3] * 2] * ranks
    same = on_ranks(3, lambda r, kv: load(CheckpointFolder(tmp_path), averaged(r, 0.0), rank=r, world_size=3, kv=kv))
    assert not [outcome for outcome in same if isinstance(outcome, Exception)]


def test_beside_what_averages_another_world_size_is_refused_for_what_does_not(tmp_path: Path) -> None:
    both = [{**averaged(rank, 0.0), **own(rank)} for rank in range(2)]
    on_ranks(2, lambda r, kv: save(CheckpointFolder(tmp_path), 3, both[r], {}, rank=r, world_size=2, kv=kv))
    with pytest.raises(CheckpointError, match="it holds values of each of 2 ranks, and now there are 1"):
        load(CheckpointFolder(tmp_path), both[0], rank=0, world_size=1, kv=None)
    missing = {**averaged(0, 0.0), "residual/rank0/v": PerRank(torch.zeros(1), averages=True)}
    with pytest.raises(CheckpointError, match="residual/rank1/v is not in the checkpoint"):
        load(CheckpointFolder(tmp_path), missing, rank=0, world_size=1, kv=None)
