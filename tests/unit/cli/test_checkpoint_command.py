"""`toolkit checkpoint` describes checkpoints, and removes none that a run may need."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import Command
from tests.file_operations import file_operations, killed_at
from tests.unit.checkpoint.ranks import blank, weights
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.checkpoint.writer import save
from toolkit.cli import checkpoints
from toolkit.cli import main as cli
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.report.facts import facts_of
from toolkit.ranks.state import Replicated


@pytest.fixture
def run() -> RunDir:
    """Return a run with the steps 20, 30 and 40.

    Step 30 has a flipped bit. Beside them are step 10, moved aside as damaged, and the left-over temporary folder of
    step 50.
    """
    run = made("digits", 10, 20, 30, 40)
    (run.checkpoints / "step-00000010").rename(run.checkpoints / "step-00000010.bad-1a2b3c4d")
    (run.checkpoints / "step-00000050.tmp-1a2b3c4d").mkdir()
    file = run.checkpoints / "step-00000030/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return run


def made(name: str, *steps: int) -> RunDir:
    run = rundir.create(name)
    run.config.write_text("")
    run.write_status(RunStatus.from_json({"state": "completed"}))
    run.write_result(RunResult.from_json({"state": "completed"}))
    checkpoints = CheckpointFolder(run.checkpoints, Keep(9))
    for step in steps:
        save(checkpoints, step, weights(float(step)), {"samples": step}, rank=0, world_size=1, kv=None)
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_the_list_shows_what_is_there_newest_first_and_what_is_odd(run: RunDir, command: Command) -> None:
    head, *lines = command("checkpoint", "list", run.id, "--wide").splitlines()
    assert head.split() == ["CHECKPOINT", "SIZE", "RANKS", "TORCH", "SAVED", "NOTE"]
    assert [line.split()[0] for line in lines[:3]] == ["step-00000040", "step-00000030", "step-00000020"]
    size_bytes = (run.checkpoints / "step-00000040/rank-00000.safetensors").stat().st_size
    assert lines[0].split()[1:5] == [f"{size_bytes}", "B", "1", torch.__version__]
    (bad, left) = ([line.split()[0], line[head.index("NOTE") :]] for line in lines[-2:])
    assert bad == ["step-00000010.bad-1a2b3c4d", "found damaged, and moved aside"]
    assert left == ["step-00000050.tmp-1a2b3c4d", "being written, or left over"]
    out = command("checkpoint", "list", run.id, "--json")
    assert [row["step"] for row in json.loads(out)] == [40, 30, 20, None, None]


def test_a_checkpoint_that_is_described_later_keeps_the_time_of_its_save(run: RunDir, command: Command) -> None:
    saved = time.time() - 7200
    for path in run.checkpoints.glob("step-*/rank-00000.*"):
        os.utime(path, (saved, saved))
    CheckpointFolder(run.checkpoints).replace_meta(40, {"metrics": {"eval/accuracy": 0.5}})
    newest = json.loads(command("checkpoint", "list", run.id, "--json"))[0]
    assert (newest["step"], newest["saved"]) == (40, pytest.approx(saved))
    assert [at for _, at, _ in facts_of(run).checkpoints] == [pytest.approx(saved)] * 3, (
        "nor does a report name another"
    )


def test_a_flipped_bit_is_found_and_named(run: RunDir, command: Command) -> None:
    forty, thirty, twenty = command.ends(EXIT_FAILED, "checkpoint", "verify", run.id).out.splitlines()
    assert forty == "step-00000040: OK (checksums match)"
    assert "is damaged: model/weight" in thirty
    assert twenty.startswith("step-00000020: OK")
    command("checkpoint", "verify", run.id, "20")
    command.ends(EXIT_FAILED, "checkpoint", "verify", run.id, "step-00000030")


def test_a_difference_is_named_and_its_absence_too(run: RunDir, command: Command) -> None:
    tensor, value, meta = command.ends(EXIT_FAILED, "checkpoint", "diff", run.id, "20", "40").out.splitlines()
    assert tensor == "tensor model/weight: float32 [3, 4] differs by 20 at most, 20 in the mean"
    assert (value, meta) == ("value optim/count: 20 and 40", "meta samples: 20 and 40")
    twin = made("twin", 20, 40)
    for step in ([], ["20"]):
        out = command("checkpoint", "diff", run.id, *step, "--with", twin.id)
        assert out == "identical: tensors, values and meta data\n"


def test_the_newest_good_checkpoint_is_exported_for_other_programs(
    run: RunDir, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "model.safetensors"
    assert command("checkpoint", "export", run.id, "--to", str(out)).startswith(f"{out}: 1 tensors of step-00000040, ")
    assert torch.equal(load_file(out)["weight"], torch.full((3, 4), 40.0))
    blank(run.checkpoints / "step-00000040/rank-00000.safetensors")
    told = command.ends(EXIT_DONE, "checkpoint", "export", run.id, "--to", str(tmp_path / "older"), "--as", "torch")
    assert "1 tensors of step-00000020" in told.out  # 30 has a flipped bit
    assert told.err.count("is damaged, the next older one is tried") == 2
    assert torch.equal(torch.load(tmp_path / "older", weights_only=True)["weight"], torch.full((3, 4), 20.0))


def test_an_export_names_what_a_criterion_has_learnt_and_all_writes_it(
    run: RunDir, tmp_path: Path, command: Command
) -> None:
    state = {**weights(1.0), "criterion/temperature": Replicated(torch.ones(1))}
    save(CheckpointFolder(run.checkpoints, Keep(9)), 60, state, {}, rank=0, world_size=1, kv=None)
    _, left_out = command("checkpoint", "export", run.id, "--to", str(tmp_path / "x.pt")).splitlines()
    assert left_out == "not in it: criterion/temperature, which the criterion has learnt; --all writes all tensors"
    assert "not in it" not in command("checkpoint", "export", run.id, "--to", str(tmp_path / "all.pt"), "--all")
    assert "criterion/temperature" in torch.load(tmp_path / "all.pt", weights_only=True)
    # Without such weights nothing is said.
    assert len(command("checkpoint", "export", run.id, "40", "--to", str(tmp_path / "y.pt")).splitlines()) == 1


def test_a_damaged_checkpoint_that_was_asked_for_is_not_replaced_by_another(run: RunDir, tmp_path: Path) -> None:
    assert cli.main(["checkpoint", "export", run.id, "30", "--to", str(tmp_path / "x.pt")]) == EXIT_FAILED
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", "digits"], "--to is missing"),
        (["export", "digits", "10", "20", "--to", "x.pt"], "unexpected argument '20'"),
        (["export", "digits", "--to", "x.onnx"], "unknown suffix .onnx; name the format: --as"),
        (["export", "digits", "--to", "nowhere/x.pt"], "is in a folder that does not exist"),
        (["export", "digits", "--to", "README.md", "--as", "torch"], "already exists; choose another name"),
        (["verify", "digits", "10", "20"], "20"),
        (["list", "digits", "10"], "10"),
        (["verify", "digits", "7"], "no checkpoint of step 7; there are: 40, 30, 20"),
        (["diff", "digits", "40"], "name two steps of its 3 checkpoints"),
        (["prune", "digits", "--keep", "1"], "--keep 1 is too few"),
    ],
)
def test_what_is_not_there_is_refused(run: RunDir, argv: list[str], words: str, command: Command) -> None:
    assert words in command.refuses("checkpoint", *argv)


def test_pruning_keeps_the_newest_and_takes_what_is_no_use(run: RunDir) -> None:
    made("other")
    assert cli.main(["checkpoint", "prune", run.id, "--keep", "2"]) == EXIT_DONE
    assert names(run) == ["step-00000030", "step-00000040"]


def test_a_run_that_may_be_writing_is_not_pruned(run: RunDir, command: Command) -> None:
    run.clear_result()
    run.write_status(RunStatus.from_json({"state": "running"}))
    before = names(run)
    assert "is running: prune it when it has ended" in command.refuses("checkpoint", "prune", run.id)
    assert names(run) == before


def test_a_checkpoint_without_its_manifest_is_not_verified(run: RunDir, command: Command) -> None:
    fsio.make_dir(run.checkpoints / "step-00000010")
    out = command.ends(EXIT_FAILED, "checkpoint", "verify", run.id).out
    assert "step-00000010/manifest.json cannot be read: No such file" in out
    assert "manifest.json cannot be read: No such file" in command("checkpoint", "list", run.id, "--wide")


def test_a_prune_that_is_killed_anywhere_leaves_whole_checkpoints() -> None:
    def prepared() -> RunDir:
        run = made("digits", 10, 20, 30, 40)
        (run.checkpoints / "step-00000010").rename(run.checkpoints / "step-00000010.bad-1a2b3c4d")
        (run.checkpoints / "step-00000050").mkdir()
        (run.checkpoints / "step-00000050/rank-00000.safetensors").touch()
        return run

    seen, run = list[str](), prepared()
    with file_operations(lambda name, path: seen.append(name)):
        checkpoints.prune(run, 2)
    assert seen.count("rmdir") == 3
    for k in range(len(seen)):
        run = prepared()
        with killed_at(k):
            checkpoints.prune(run, 2)
        folder = CheckpointFolder(run.checkpoints)
        assert {found.step for found in map(folder.valid_manifest, folder.list()) if found} in ({20, 30, 40}, {30, 40})
        checkpoints.prune(run, 2)
        assert names(run) == ["step-00000030", "step-00000040"]
