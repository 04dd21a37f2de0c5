"""`toolkit compare`: what differs between two runs, and nothing else."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.command import Command
from tests.unit.cli.test_logs_command import new_run, run  # noqa: F401
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.cli import main as cli
from toolkit.files.rundir import RunDir


def test_compare_names_what_differs_and_nothing_else(run: RunDir, command: Command) -> None:
    other = new_run("other", "0.2")
    for each, bias in ((run, 0.0), (other, 1.0)):
        points = [{"step": step, "train/loss": step + bias, "world/x": bias} for step in range(3)]
        # one run is further on, so the last values are of different steps
        points += [{"step": 9, "train/loss": 9.0}] * (each is run)
        text = "".join(json.dumps(point) + "\n" for point in points)
        (each.tensorboard / "metrics.jsonl").write_text(text)
        (each.code / "jobs").mkdir(parents=True)
        (each.code / "jobs/same.py").write_text("same\n")
        (each.code / "jobs/main.py").write_text(f"bias = {bias}\n")
    (other.code / "new.py").write_text("")
    found = json.loads(command("compare", run.id, other.id, "--json"))
    assert found["config"] == {"name": ["digits", "other"], "optim.lr": ["0.1", "0.2"]}
    assert found["results"] == {"eval/accuracy": [0.1, 0.2]}
    assert found["curves"] == {
        "train/loss": {"last": [9.0, 3.0], "common_step": 2, "at_common_step": [2.0, 3.0]},
    }
    assert found["sources"]["only_second"] == ["new.py"]
    assert found["sources"]["changed"] == ["jobs/main.py"]
    ours = Path(run.path.parent, "a"), Path(run.path.parent, "b")
    for path, each in zip(ours, (run, other), strict=True):
        path.write_bytes((each.code / "jobs/main.py").read_bytes())
    theirs = subprocess.run(["diff", "-u", *map(str, ours)], capture_output=True, text=True, check=False).stdout
    assert found["sources"]["diff"].splitlines()[2:] == theirs.splitlines()[2:]
    assert "optim.lr" in command("compare", run.id, other.id)


def test_values_that_are_not_shown_are_compared_all_the_same(run: RunDir, command: Command) -> None:
    other = new_run("digits", "0.1")
    for each, size in ((run, "1024"), (other, "4096")):
        params = f"{{context_tokens: {size}, tokenizer: {size}, same_token: hidden, hf_token: hidden-{size}}}"
        each.config.write_text(f"name: digits\nparams: {params}\n")
    text = command("compare", run.id, other.id, "--json")
    assert json.loads(text)["config"] == {
        "params.context_tokens": ["1024", "4096"],
        "params.tokenizer": ["1024", "4096"],
        "params.hf_token": ["(not shown)", "(not shown)"],
    }


def test_a_run_compared_with_itself_differs_in_nothing(run: RunDir, command: Command) -> None:
    out = command("compare", run.id, run.id)
    assert out.count("no difference") == 5


def test_a_run_whose_files_are_torn_is_compared_as_far_as_it_can_be_read(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    other = new_run("other", "0.2")
    (other.path / "status.json").write_bytes(b"\0" * 50)
    (other.tensorboard / "metrics.jsonl").write_bytes(b'{"step": 1, "train/loss": 2}\n{"st\n')
    other.config.unlink()
    assert cli.main(["compare", run.id, str(other.path)]) in (EXIT_DONE, EXIT_REQUEST)
    assert cli.main(["compare", run.id, other.id]) == EXIT_DONE
    for name in ("status.json", "metrics.jsonl", "config.yaml"):
        assert name in caplog.text
