"""Weights are read from files that safetensors, torch and torch's DCP wrote. No file is ever executed."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.checkpoint.ranks import Bomb, alone, blank, weights
from toolkit.base.errors import CheckpointError, ConfigError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.whole import export
from toolkit.files import origin, rundir
from toolkit.files.rundir import RunDir
from toolkit.ranks.state import Replicated
from toolkit.train.initial import read_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.half": torch.ones(2, dtype=torch.bfloat16)}


def dcp_save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


def folder_save(path: Path, *, parts: int) -> None:
    """Write as transformers does: one file, or several and an index."""
    path.mkdir()
    names = list(TENSORS)
    files = [f"model-{part}.safetensors" for part in range(parts)] if parts > 1 else ["model.safetensors"]
    for part, file in enumerate(files):
        save_file({name: TENSORS[name] for name in names[part::parts]}, path / file)
    if parts > 1:
        weight_map = {name: files[number % parts] for number, name in enumerate(names)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


#: Who writes the tensors how.
WAYS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "safetensors": ("w.safetensors", lambda path: save_file(TENSORS, path)),
    "state dict": ("w.pt", lambda path: torch.save(TENSORS, path)),
    "old file": ("w.pth", lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False)),
    "trainer": ("w.pt", lambda path: torch.save({"epoch": 3, "state_dict": TENSORS, "lr": [0.1]}, path)),
    "nested": ("w.pt", lambda path: torch.save({"model": TENSORS, "optimizer": {"state": {}}}, path)),
    "folder": ("w", partial(folder_save, parts=1)),
    "folder of parts": ("w", partial(folder_save, parts=2)),
    "dcp": ("w", lambda path: dcp_save(dict(TENSORS), path)),
    "nested dcp": ("w", lambda path: dcp_save({"model": dict(TENSORS), "epoch": 3, "lr": [0.1]}, path)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_others_write_is_read(tmp_path: Path, way: str) -> None:
    name, write = WAYS[way]
    write(tmp_path / name)
    path, found, _ = read_weights(origin.find(str(tmp_path / name)))
    assert path == tmp_path / name
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    folder_save(tmp_path / "w", parts=2)
    index = {"weight_map": {"weight": "../w.safetensors"}}
    (tmp_path / "w/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        read_weights(origin.find(str(tmp_path / "w")))


@pytest.fixture
def run() -> RunDir:
    """Return a run with the steps 100 and 200, whose weights are 100 and 200."""
    run = rundir.create("digits")
    run.config.write_text("")
    for step in (100, 200):
        alone(CheckpointFolder(run.checkpoints), step, weights(float(step)))
    return run


def value(found: dict[str, Tensor]) -> float:
    assert list(found) == ["weight"]  # the model's, and none of the optimizer's
    return float(found["weight"].unique().item())


def test_a_run_is_found_by_its_folder_id_prefix_and_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parent)
    for text in (str(run.path), run.id, run.id[:-2], "digits", f"./{run.id}"):
        path, found, _ = read_weights(origin.find(text))
        assert (path.name, value(found)) == ("step-00000200", 200.0)


def test_of_a_run_the_newest_good_checkpoint_is_read_and_nothing_is_moved(run: RunDir) -> None:
    blank(run.checkpoints / "step-00000200/rank-00000.safetensors")
    path, found, _ = read_weights(origin.find("digits"))
    assert (path.name, value(found)) == ("step-00000100", 100.0)
    blank(run.checkpoints / "step-00000100/rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is usable"):
        read_weights(origin.find("digits"))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000100", "step-00000200"]


def test_a_checkpoint_is_read_wherever_its_folder_was_copied_to(run: RunDir, tmp_path: Path) -> None:
    (run.checkpoints / "step-00000100").rename(tmp_path / "best")
    path, found, _ = read_weights(origin.find(str(tmp_path / "best")))
    assert (path, value(found)) == (tmp_path / "best", 100.0)
    blank(tmp_path / "best/rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_weights(origin.find(str(tmp_path / "best")))


@pytest.mark.parametrize(("form", "name"), [("safetensors", "w.safetensors"), ("torch", "w.pt"), ("dcp", "w")])
def test_of_an_export_with_everything_in_it_the_models_weights_are_read(
    run: RunDir, tmp_path: Path, form: str, name: str
) -> None:
    state = {**weights(7.0), "optim/weight/momentum": Replicated(torch.ones(3, 4))}
    path = alone(CheckpointFolder(run.checkpoints), 300, state)
    manifest = CheckpointFolder(run.checkpoints).manifest(path)
    export(path, manifest, tmp_path / name, form, run=run.id, everything=True)
    assert value(read_weights(origin.find(str(tmp_path / name)))[1]) == 7.0


def test_the_run_that_asks_is_not_its_own_origin(run: RunDir) -> None:
    newer = RunDir(run.path.with_name("99991231-235959-ffff"))
    newer.path.mkdir()
    newer.config.write_text("")
    assert rundir.find("digits") == newer
    assert origin.find("digits").path == run.path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere/model.pt", "is not a file, a checkpoint's folder .* or a run"),
        ("digit", "did you mean 'digits'"),
        ("empty", "has no checkpoint in"),
        ("README.md", r"is none of \.safetensors, \.pt, \.pth"),
    ],
)
def test_what_is_no_origin_is_refused_with_what_there_is(run: RunDir, text: str, words: str) -> None:
    rundir.create("empty").config.write_text("")
    with pytest.raises(ConfigError, match=rf"^model\.init_from: .*{words}"):
        origin.find(text)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_forged_file_of_torch_runs_no_code(tmp_path: Path, zipped: bool) -> None:
    forged = {**TENSORS, "extra": Bomb(tmp_path / "ran")}
    torch.save(forged, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"w\.pt cannot be read as torch"):
        read_weights(origin.find(str(tmp_path / "w.pt")))
    assert not (tmp_path / "ran").exists()


def test_forged_metadata_of_a_dcp_folder_runs_no_code(tmp_path: Path) -> None:
    dcp_save(dict(TENSORS), tmp_path / "w")
    (tmp_path / "w/.metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir has no place in the metadata of tensors"):
        read_weights(origin.find(str(tmp_path / "w")))
    assert not (tmp_path / "ran").exists()


def test_a_forged_value_beside_the_tensors_of_a_dcp_folder_runs_no_code(tmp_path: Path) -> None:
    dcp_save({**TENSORS, "extra": Bomb(tmp_path / "ran")}, tmp_path / "w")
    assert read_weights(origin.find(str(tmp_path / "w")))[1].keys() == TENSORS.keys()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_file_that_is_cut_off_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    WAYS["safetensors" if name.endswith("s") else "state dict"][1](tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read as"):
        read_weights(origin.find(str(tmp_path / name)))


def test_a_dcp_folder_without_one_of_its_files_is_an_error_that_names_both(tmp_path: Path) -> None:
    dcp_save(dict(TENSORS), tmp_path / "w")
    next((tmp_path / "w").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"w cannot be read as dcp: .*No such file.*\.distcp"):
        read_weights(origin.find(str(tmp_path / "w")))


def test_a_file_without_names_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="it holds a list; weights are tensors by their names"):
        read_weights(origin.find(str(tmp_path / "w.pt")))
