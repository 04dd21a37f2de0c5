"""Damage of any kind is detected, skipped with a reason and moved aside.

No content of a checkpoint is ever executed.
"""

import json
import logging
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.ranks import Bomb, alone, load_alone, load_on, save_on, tensor_of, weights
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.checkpoint.manifest import CorruptCheckpointError
from toolkit.ranks.state import PerRank, Replicated

pytestmark = pytest.mark.chaos


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """Return a folder with the steps 100 and 200, whose weights are 100.0 and 200.0."""
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    alone(checkpoints, 100, weights(100.0))
    alone(checkpoints, 200, weights(200.0))
    return checkpoints


def loaded_value(checkpoints: CheckpointFolder) -> float:
    state = weights(0.0)
    assert load_alone(checkpoints, state)
    return float(tensor_of(state["model/weight"]).unique().item())


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rewrite(folder: Path, change: Any) -> None:
    """Forge the manifest: `change` its fields, and give it a right crc32."""
    path = folder / manifests.NAME
    fields = json.loads(path.read_bytes())["manifest"]
    change(fields)
    path.write_bytes(manifests._frame(2, json.dumps(fields).encode()))


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_each_flipped_bit_in_any_file_is_detected_on_load(checkpoints: CheckpointFolder, count: int) -> None:
    files = sorted(checkpoints.path(200).iterdir())
    bits = [(path, bit) for path in files for bit in range(8 * path.stat().st_size)]
    seed = random.randrange(10**6)
    print(f"seed {seed}, {len(bits)} bits in {len(files)} files")
    undetected = []
    for path, bit in random.Random(seed).sample(bits, count):
        flip(path, bit)
        loaded = load_alone(checkpoints, weights(0.0), read_only=True)
        if loaded is None or loaded.step != 100:
            undetected.append((path.name, bit))
        flip(path, bit)
    assert undetected == []
    assert checkpoints.verify(checkpoints.path(200)).step == 200


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_and_moved_aside(
    checkpoints: CheckpointFolder, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    flip(checkpoints.path(200) / name, 77)
    assert loaded_value(checkpoints) == 100.0
    assert any("skipping step-00000200" in m and name in m for m in caplog.messages)
    assert [path.name.split(".bad-")[0] for path in checkpoints.folder.glob("*.bad-*")] == ["step-00000200"]
    alone(checkpoints, 200, weights(201.0))  # the step can be saved again
    assert loaded_value(checkpoints) == 201.0


@pytest.mark.parametrize("missing", [1, 47, 49, None, -1])
def test_a_truncated_or_longer_file_is_detected(checkpoints: CheckpointFolder, missing: int | None) -> None:
    file = checkpoints.path(200) / "rank-00000.safetensors"
    size = file.stat().st_size
    left = size - (size if missing is None else missing)
    os.truncate(file, left)
    with pytest.raises(CorruptCheckpointError, match=f"has {left} bytes instead of {size}"):
        checkpoints.verify(checkpoints.path(200))
    assert loaded_value(checkpoints) == 100.0


def test_a_missing_file_is_detected(checkpoints: CheckpointFolder) -> None:
    (checkpoints.path(200) / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors cannot be read: No such file"):
        checkpoints.verify(checkpoints.path(200))


def test_a_checkpoint_whose_manifest_is_gone_is_damaged_and_its_step_can_be_saved(
    checkpoints: CheckpointFolder,
) -> None:
    (checkpoints.path(200) / manifests.NAME).unlink()
    assert loaded_value(checkpoints) == 100.0
    assert newest_step(checkpoints.folder) == 100  # it was moved aside
    alone(checkpoints, 200, weights(202.0))
    assert loaded_value(checkpoints) == 202.0


def test_where_all_manifests_are_gone_the_run_does_not_begin_anew(checkpoints: CheckpointFolder) -> None:
    for path in checkpoints.list():
        (path / manifests.NAME).unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is usable"):
        load_alone(checkpoints, weights(0.0))


def replaced_by_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()


def linked_to_nothing(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("not-mounted"))


@pytest.mark.parametrize("lose", [linked_to_nothing, replaced_by_a_file])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    lose: Callable[[Path], None], checkpoints: CheckpointFolder
) -> None:
    lose(checkpoints.folder)
    with pytest.raises(CheckpointError, match=f"listing {re.escape(str(checkpoints.folder))} failed"):
        load_alone(checkpoints, weights(0.0))
    assert newest_step(checkpoints.folder) is None  # what only reports it continues


def test_rank_0_may_refuse_to_begin_anew_and_all_ranks_say_why(tmp_path: Path) -> None:
    def refuse() -> None:
        raise CheckpointError("there was one of step 200")

    ends = load_on(tmp_path / "checkpoints", [weights(0.0), weights(0.0)], refuse_none=refuse)
    assert [type(end) for end in ends] == [CheckpointError] * 2
    assert all("there was one of step 200" in str(end) for end in ends)


def test_when_all_are_damaged_the_run_stops_instead_of_starting_anew(checkpoints: CheckpointFolder) -> None:
    for path in checkpoints.list():
        flip(path / "rank-00000.safetensors", 5)
    for _attempt in range(2):  # nothing is moved, so the next attempt does not start at step 0 either
        with pytest.raises(CheckpointError, match="none of the 2 checkpoints is usable, and all were left in place"):
            load_alone(checkpoints, weights(0.0))
    assert len(checkpoints.list()) == 2


def test_read_only_loading_changes_no_file(checkpoints: CheckpointFolder) -> None:
    flip(checkpoints.path(200) / "rank-00000.safetensors", 5)
    (checkpoints.folder / "step-00000300.tmp-0badcafe").mkdir()
    before = sorted(checkpoints.folder.rglob("*"))
    loaded = load_alone(checkpoints, weights(0.0), read_only=True)
    assert loaded
    assert loaded.step == 100
    assert list(loaded.skipped) == ["step-00000200"]
    assert sorted(checkpoints.folder.rglob("*")) == before


def test_damage_that_one_rank_sees_makes_all_ranks_fall_back(tmp_path: Path) -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        return {"w": Replicated(torch.full((2,), value)), f"own/rank{rank}": PerRank(torch.full((2,), value))}

    for step in (1, 2):
        save_on(tmp_path, [state(rank, float(step)) for rank in range(3)], step)
    file = tmp_path / "step-00000002/rank-00002.safetensors"  # only rank 2 reads it
    flip(file, 8 * file.stat().st_size - 3)
    lives = [state(rank, 0.0) for rank in range(3)]
    found = [(loaded.step, list(loaded.skipped)) for loaded in load_on(tmp_path, lives)]
    assert found == [(1, ["step-00000002"])] * 3
    assert [float(live["w"].value[0]) for live in lives] == [1.0] * 3


def test_a_newer_format_is_refused_naming_both_versions(checkpoints: CheckpointFolder) -> None:
    path = checkpoints.path(200) / manifests.NAME
    path.write_bytes(manifests._frame(3, b'{"all": "new"}'))
    with pytest.raises(CheckpointError, match="has format 3 and this toolkit reads up to format 2"):
        load_alone(checkpoints, weights(0.0))
    assert len(checkpoints.list()) == 2


def test_a_forged_manifest_runs_no_code(checkpoints: CheckpointFolder, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    (checkpoints.path(200) / manifests.NAME).write_bytes(bomb)
    (checkpoints.path(100) / "rank-00000.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is usable"):
        load_alone(checkpoints, weights(0.0))
    assert not (tmp_path / "ran").exists()


BAD_NAMES = ["../secret", "/etc/passwd", "rank-00000.safetensors/../../secret", "", None, 3]
BAD_NAMES += ["rank-1.bin", "rank-1.safetensors", "rank-00000.pt"]
BAD_NAMES += ["library/..", "./library", "library/./x", "library//x", "library/", "library"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_leads_elsewhere_is_refused(checkpoints: CheckpointFolder, name: Any) -> None:
    def forge(fields: Any) -> None:
        fields["files"] = {str(name): 48}
        fields["tensors"]["model/weight"]["parts"][0]["file"] = name

    rewrite(checkpoints.path(200), forge)
    with pytest.raises(CorruptCheckpointError, match=r"not of the form rank-00000\.safetensors"):
        checkpoints.verify(checkpoints.path(200))


def test_a_symbolic_link_in_place_of_a_file_is_refused(checkpoints: CheckpointFolder) -> None:
    data = checkpoints.path(200) / "rank-00000.safetensors"
    data.rename(data.with_name("elsewhere"))
    more = data.with_name("elsewhere").stat().st_size - len("elsewhere")
    data.symlink_to("./" * (more // 2) + "/" * (more % 2) + "elsewhere")
    assert data.lstat().st_size == data.stat().st_size  # the size alone does not tell
    with pytest.raises(CorruptCheckpointError):
        checkpoints.verify(checkpoints.path(200))
    assert loaded_value(checkpoints) == 100.0


#: Of a tensor, and of its one part.
LIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[({}, part) for part in ({"start": -8}, {"start": 8}, {"size_bytes": 1 << 60}, {"size_bytes": "48"})],
    *[({}, part) for part in ({"crc32": None}, {"shape": [9, 9]})],
    *[({"dtype": dtype}, {}) for dtype in ("float33", "float64", "bfloat16")],
    ({"shape": [2, 8], "kind": "per_rank"}, {"shape": [2, 8], "offsets": [0, 0]}),
]


@pytest.mark.parametrize(("tensor", "part"), LIES, ids=str)
def test_ranges_types_and_shapes_that_lie_are_refused_before_memory_is_taken(
    checkpoints: CheckpointFolder, tensor: dict[str, Any], part: dict[str, Any]
) -> None:
    def forge(fields: Any) -> None:
        fields["tensors"]["model/weight"].update(tensor)
        fields["tensors"]["model/weight"]["parts"][0].update(part)

    rewrite(checkpoints.path(200), forge)
    with pytest.raises(CorruptCheckpointError, match="is not a manifest of format 2"):
        checkpoints.verify(checkpoints.path(200))


def test_a_name_of_a_tensor_and_a_value_or_a_rank_that_there_was_not_is_refused(checkpoints: CheckpointFolder) -> None:
    for name, rank in (("model/weight", 0), ("stream/rank9", 9)):
        record = {"kind": "per_rank", "rank": rank, "value": None}
        rewrite(checkpoints.path(200), lambda fields, n=name, r=record: fields["values"].update({n: r}))
        with pytest.raises(CorruptCheckpointError, match=name):
            checkpoints.verify(checkpoints.path(200))


def test_a_manifest_nested_too_deeply_is_damage_and_no_crash(checkpoints: CheckpointFolder) -> None:
    body = b"[" * 200_000
    (checkpoints.path(200) / manifests.NAME).write_bytes(manifests._frame(2, body))
    with pytest.raises(CorruptCheckpointError):
        checkpoints.verify(checkpoints.path(200))


def test_a_renamed_checkpoint_is_not_taken_for_another_step(checkpoints: CheckpointFolder) -> None:
    checkpoints.path(200).rename(checkpoints.path(900))
    with pytest.raises(CorruptCheckpointError, match="holds step 200"):
        checkpoints.verify(checkpoints.path(900))
