"""Ranks as threads around torch's HashStore: all return the same or all raise the same."""

import errno
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import load_alone, load_on, on_ranks, save_on, tensor_of, weights
from toolkit.base.errors import CheckpointError, SaveGivenUpError, UnsavableStateError
from toolkit.checkpoint import exchange
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.exchange import Exchange
from toolkit.checkpoint.folder import CheckpointFolder, file_errors
from toolkit.checkpoint.reader import load
from toolkit.checkpoint.writer import BackgroundSave, save
from toolkit.ranks.state import PerRank, Replicated, Sharded, State


def own(rank: int, value: float = 0.0) -> State:
    return {**weights(value), f"own/rank{rank}": PerRank(torch.full((4,), value + rank))}


def owns(count: int) -> list[State]:
    return [own(rank) for rank in range(count)]


def messages(outcomes: list[object]) -> list[str]:
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


def test_two_ranks_save_and_both_get_the_path(tmp_path: Path) -> None:
    paths = save_on(tmp_path, owns(2))
    assert paths == [tmp_path / "step-00000003"] * 2
    names = sorted(p.name for p in paths[0].iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_at_a_resume_rank_0_alone_looks_at_the_files_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of 1,000 ranks looked at 1,000 files, twice."""
    save_on(tmp_path, owns(3))
    looked = list[int]()
    plain = manifests.check_sizes
    monkeypatch.setattr(manifests, "check_sizes", lambda *of: looked.append(1) or plain(*of))
    assert [getattr(loaded, "step", loaded) for loaded in load_on(tmp_path, owns(3))] == [3, 3, 3]
    assert len(looked) == 1


def test_a_rank_that_holds_only_replicas_writes_no_file(tmp_path: Path) -> None:
    save_on(tmp_path, [weights(1.0)] * 2)
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


class BusyStore:
    """A store in which rank 0 notes three times that it is busy, and then says that there is no checkpoint."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        return keys == ["checkpoint/busy/0"] or self.looks == 3

    def get(self, key: str) -> bytes:
        if key != "checkpoint/busy/0":
            return b'{"done": false, "skipped": {}}'
        self.looks += 1
        return str(self.looks).encode()


def test_a_rank_waits_for_one_that_is_busy_however_long_it_takes(tmp_path: Path) -> None:
    kv: Any = BusyStore()
    assert load(CheckpointFolder(tmp_path), own(1), rank=1, world_size=2, kv=kv, timeout_s=0.0) is None
    assert kv.looks == 3


def test_a_save_that_one_rank_gives_up_for_a_stop_is_no_failure_on_any(tmp_path: Path) -> None:
    def give_up() -> None:
        raise SaveGivenUpError("given up for a stop")

    def run(rank: int, kv: HashStore) -> Path:
        folder = CheckpointFolder(tmp_path, on_progress=give_up if rank == 1 else lambda: None)
        return save(folder, 3, own(rank), {}, rank=rank, world_size=2, kv=kv)

    outcomes = on_ranks(2, run)
    assert [type(outcome) for outcome in outcomes] == [SaveGivenUpError] * 2
    noted: list[int] = []

    def raise_it() -> Path:
        raise outcomes[0]

    writing = BackgroundSave(3, None, raise_it, lambda step, error: noted.append(step))
    writing.wait()
    assert (writing.error, noted) == (outcomes[0], [])


def test_a_rank_that_hears_nothing_from_rank_0_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 received nothing about its checkpoint from rank 0 for 0\.2 s"):
        save(CheckpointFolder(tmp_path), 3, own(1), {}, rank=1, world_size=2, kv=HashStore(), timeout_s=0.1)


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
    states = [{"w": Replicated(of.to(dtype)), "empty": Replicated(torch.zeros(0))} for of in (SAME, other)]
    assert save_on(tmp_path, states) == [tmp_path / "step-00000003"] * 2


@pytest.mark.parametrize("bit", range(32))
def test_a_single_flipped_bit_tells_replicas_apart(tmp_path: Path, bit: int) -> None:
    flipped = SAME[:29].clone()
    flipped.view(torch.int32)[bit % 29] ^= 1 << bit if bit < 31 else -1 << bit
    outcomes = save_on(tmp_path, [{"w": Replicated(values)} for values in (SAME[:29], flipped)])
    assert all("w declared as replicated" in text for text in messages(outcomes))


def rows(start: int, stop: int) -> State:
    return {"w": Sharded(torch.zeros(stop - start, 2), (3, 2), (start, 0))}


DRIFTED: list[State] = [
    {"same": Replicated(torch.ones(2)), "drifted": Replicated(torch.ones(2) * (1 + rank * 1e-7))} for rank in range(2)
]
GAP = "overlap or leave a gap"
#: What two ranks declare, and what each of them is told.
REFUSED: dict[str, tuple[list[State], str]] = {
    "drifted replicas": (DRIFTED, "drifted declared as replicated, but rank 1 and rank 0 hold different values"),
    "numbers that differ": ([{"n": Replicated(rank)} for rank in range(2)], "n declared as replicated"),
    "other names": (
        [{f"w{rank}": Replicated(torch.ones(1))} for rank in range(2)],
        "rank 1 declares other replicated values",
    ),
    "shards that overlap": ([rows(0, 2), rows(1, 3)], GAP),
    "shards with a gap": ([rows(0, 1), rows(2, 3)], GAP),
    "a shard twice": ([rows(0, 3), rows(0, 3)], GAP),
    "one name of each rank": ([{"mine": PerRank(torch.zeros(2))}] * 2, "two ranks declare mine as their own"),
}


@pytest.mark.parametrize(("states", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_states_that_make_up_no_whole_are_refused_on_all_ranks(
    tmp_path: Path, states: list[State], complaint: str
) -> None:
    outcomes = save_on(tmp_path, states)
    if complaint != GAP:
        assert all(isinstance(outcome, UnsavableStateError) for outcome in outcomes)
    assert all(complaint in text for text in messages(outcomes))
    assert list(tmp_path.iterdir()) == []


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    def run(rank: int, kv: HashStore) -> Path:
        return save(CheckpointFolder(tmp_path), 3 + rank, own(rank), {}, rank=rank, world_size=2, kv=kv)

    assert "it saves step 4 while rank 0 saves step 3" in messages(on_ranks(2, run))[0]


def test_per_rank_values_are_refused_at_another_world_size(tmp_path: Path) -> None:
    save_on(tmp_path, owns(2))
    with pytest.raises(CheckpointError, match="it holds values of each of 2 ranks, and now there are 1"):
        load_alone(CheckpointFolder(tmp_path), own(0))


def test_replicated_state_is_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    save_on(tmp_path, [weights(7.0)] * 2)
    states = [weights(0.0) for _ in range(3)]
    assert all(load_on(tmp_path, states))
    assert [float(tensor_of(state["model/weight"]).mean()) for state in states] == [7.0] * 3


def test_a_rank_with_another_model_stops_all_ranks(tmp_path: Path) -> None:
    save_on(tmp_path, [weights(7.0)] * 2)
    texts = messages(load_on(tmp_path, [weights(0.0), {"model/weight": Replicated(torch.zeros(9))}]))
    assert all("does not fit this model and strategy" in text and "rank 1 on" in text for text in texts)


def test_no_checkpoint_is_none_on_all_ranks(tmp_path: Path) -> None:
    assert load_on(tmp_path, owns(2)) == [None, None]


def test_a_conversation_of_an_earlier_attempt_in_the_same_store_is_not_heard(tmp_path: Path) -> None:
    kv = HashStore()
    with pytest.raises(CheckpointError, match="no word"):  # attempt 1: rank 1 never comes
        save(CheckpointFolder(tmp_path), 3, own(0), {}, rank=0, world_size=2, kv=kv, timeout_s=0.05)
    with pytest.raises(CheckpointError, match="received nothing"):  # attempt 2 must not take that error for its own
        save(CheckpointFolder(tmp_path), 3, own(1), {}, rank=1, world_size=2, kv=kv, timeout_s=0.05, attempt=2)


def copies(rank: int, value: float = 1.0) -> State:
    """Return a rank's half of a tensor. Ranks 0 and 1 hold the two halves, ranks 2 and 3 copies of them."""
    half = torch.full((2, 3), value + rank % 2)
    return {"w": Sharded(half, (4, 3), (2 * (rank % 2), 0), is_copy=rank > 1)}


def test_a_part_that_several_ranks_hold_is_written_once_and_read_by_all(tmp_path: Path) -> None:
    save_on(tmp_path, [copies(rank) for rank in range(4)])
    states = [copies(rank, 0.0) for rank in range(4)]
    assert all(load_on(tmp_path, states))
    for rank, state in enumerate(states):
        assert torch.equal(tensor_of(state["w"]), torch.full((2, 3), 1.0 + rank % 2))
    names = sorted(path.name for path in (tmp_path / "step-00000003").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def test_copies_of_a_part_that_have_drifted_apart_are_refused_with_name_and_rank(tmp_path: Path) -> None:
    for message in messages(save_on(tmp_path, [copies(rank, 1.0 + (rank == 3)) for rank in range(4)])):
        assert "w: rank 3 holds another value than the rank that writes its part" in message
    assert list(tmp_path.glob("step-*")) == []


def averaged(rank: int, value: float) -> State:
    name = f"residual/rank{rank}/w"
    return {**weights(0.0), name: PerRank(torch.full((2, 3), value + rank), averages=True)}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_averages_starts_from_the_mean_of_all_ranks_at_another_world_size(tmp_path: Path, ranks: int) -> None:
    save_on(tmp_path, [averaged(rank, 1.5) for rank in range(3)])
    states = [averaged(rank, 0.0) for rank in range(ranks)]
    load_on(tmp_path, states)
    found = [tensor_of(state[f"residual/rank{rank}/w"]).tolist() for rank, state in enumerate(states)]
    assert found == [[[2.5] * 3] * 2] * ranks
    same = load_on(tmp_path, [averaged(rank, 0.0) for rank in range(3)])
    assert not [outcome for outcome in same if isinstance(outcome, Exception)]


def test_beside_what_averages_another_world_size_is_refused_for_what_does_not(tmp_path: Path) -> None:
    both = [{**averaged(rank, 0.0), **own(rank)} for rank in range(2)]
    save_on(tmp_path, both)
    with pytest.raises(CheckpointError, match="it holds values of each of 2 ranks, and now there are 1"):
        load_alone(CheckpointFolder(tmp_path), both[0])
    missing = {**averaged(0, 0.0), "residual/rank0/v": PerRank(torch.zeros(1), averages=True)}
    with pytest.raises(CheckpointError, match="residual/rank1/v is not in the checkpoint"):
        load_alone(CheckpointFolder(tmp_path), missing)


WAIT_S = 60.0


class Store:
    """A store in which rank 0's answer appears after ``WAIT_S``; it counts the looks. The clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.now = 0.0
        monkeypatch.setattr(exchange, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.now >= WAIT_S

    def get(self, key: str) -> bytes:
        return json.dumps({"ok": True}).encode()

    def set(self, key: str, value: str) -> None:
        """Drop a report of the test's rank."""

    def delete_key(self, key: str) -> bool:
        raise AssertionError("it only listens")


def waited(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Store:
    store = Store(monkeypatch)
    talk = Exchange(store, rank=1, world_size=ranks, topic="save", number=1, timeout_s=600.0)
    assert talk.listen() == {"ok": True}
    return store


@pytest.mark.parametrize("ranks", [8, 500, 8000, 80_000])
def test_all_ranks_that_wait_in_a_save_together_do_not_fill_the_store(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Before, each rank looked ten times a second. 5,500 waiting ranks kept the store's core busy."""
    store = waited(monkeypatch, ranks)
    looks_a_second = store.looks * ranks / WAIT_S
    assert looks_a_second < 25_000
    assert store.now - WAIT_S <= max(0.1, ranks / 5000)


def test_few_ranks_look_as_often_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    store = waited(monkeypatch, 8)
    assert 10 * WAIT_S < store.looks < 11 * WAIT_S


class SilentRanks(Store):
    """A store in which each rank has noted in an earlier load that it was busy. One notes it again until ``until``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: str, until: float) -> None:
        super().__init__(monkeypatch)
        self._busy, self._until = busy, until

    def check(self, keys: list[str]) -> bool:
        return keys[0].startswith("checkpoint/busy/")

    def get(self, key: str) -> bytes:
        return str(min(self.now, self._until) if key.endswith(f"/{self._busy}") else 5.0).encode()

    def delete_key(self, key: str) -> bool:
        return False


@pytest.mark.parametrize(("until", "most_s"), [(0.0, WAIT_S), (4 * WAIT_S, 6 * WAIT_S)])
def test_what_ranks_noted_in_an_earlier_load_does_not_add_up(
    monkeypatch: pytest.MonkeyPatch, until: float, most_s: float
) -> None:
    store = SilentRanks(monkeypatch, "30", until)
    talk = Exchange(store, rank=0, world_size=40, topic="load", number=2, timeout_s=WAIT_S)
    with pytest.raises(CheckpointError, match="no word within 60 s from rank 1, 2, 3"):
        talk.gather()
    assert until < store.now <= most_s + 1.0


def test_a_rank_that_has_reported_waits_for_a_slow_rank_0_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it gave up after 20 minutes, and rank 0 then committed: the ranks disagreed about the save."""
    talk = Exchange(Store(monkeypatch), rank=1, world_size=2, topic="save", number=1, timeout_s=WAIT_S / 10)
    talk.report({})
    assert talk.listen() == {"ok": True}
