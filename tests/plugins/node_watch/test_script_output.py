"""What is read from the output of scripts that do not know the toolkit. The files are outputs of real libraries."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.files.rundir import all_runs
from toolkit.plugins.node_watch.script_output import named_folders, newest_checkpoint, parse_progress

PRINTED = Path(__file__).parent / "printed"
TIMM = "Train: 3 [ 120/500 ( 24%)]  Loss: 6.91 (6.92)  Time: 0.200s,  640.00/s  (0.210s,  610.00/s)  LR: 1.0e-03"


def read(text: str) -> tuple[object, ...]:
    found = parse_progress(text)
    return found.step, found.total_steps, found.epoch, found.epochs, found.loss


@pytest.mark.parametrize(
    ("name", "expected", "rate", "eta_s"),
    [
        ("transformers", (25, 32, 1, None, 2.494), 34.12, 7 / 34.12),  # the bar is of all epochs
        ("evaluation", (15, 32, 0, None, 2.39), 22.63, 17 / 22.63),  # below it is the bar of an evaluation
        ("accelerate", (20, 32, 2, 2, 0.0228), 91.13, 12 / 91.13),
        ("lightning", (32, 32, 2, 2, 0.008), 27.88, 0.0),
    ],
)
def test_the_output_of_libraries_is_read(name: str, expected: object, rate: float, eta_s: float) -> None:
    text = (PRINTED / f"{name}.txt").read_bytes().decode()
    found = parse_progress(text)
    assert (read(text), found.steps_per_s) == (expected, rate)
    assert found.eta_s == pytest.approx(eta_s)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epoch 3 loss 0.12", (None, None, 3, None, 0.12)),
        ("Epoch [3/10], Step [100/500], Loss: 0.1234", (100, 500, 3, 10, 0.1234)),
        ("iter 100: loss 2.3021, time 12.31ms, mfu 3.2%", (100, None, None, None, 2.3021)),
        ("step: 7 of 20 | train_loss=1e-3 | val_loss=7", (7, 20, None, None, 0.001)),
        ("{'eval_loss': 0.3, 'epoch': 2.0}", (None, None, 2, None, None)),
        (TIMM, (120, 500, 3, None, 6.91)),
        ("Epoch 1:  40%|####  | 2/5 [00:01<00:02, 2.00s/it, train_loss=0.5]", (2, 5, 1, None, 0.5)),
        ("Epochs:  30%|###   | 3/10 [00:01<00:02, 2.00s/it]", (None, None, 3, 10, None)),
        ("Loading weights:  40%|####  | 2/5 [00:01<00:02, 1.9it/s]", (None,) * 5),
        ("Validation:  40%|####  | 2/5 [00:01<00:02, 1.9it/s, loss=3]", (None,) * 5),
        ("max step: 500, warmup steps: 10, batch size 32, lossless 3, step 1.5", (None,) * 5),
        ("ModuleNotFoundError: no step here, 17/20 lights on", (None,) * 5),
        ("", (None,) * 5),
    ],
)
def test_lines_are_read_and_what_is_no_progress_is_not(line: str, expected: object) -> None:
    assert read(line) == expected
    assert read(f"{line}\nsaved\n") == expected


def test_a_rate_without_an_end_gives_no_time_left() -> None:
    """The steps of an epoch say nothing about the run, where the number of epochs is not known."""
    bar = "  40%|####  | 2/5 [00:01<00:02, 2.00s/it]"
    assert parse_progress(bar).eta_s == 6.0
    assert parse_progress(f"Epoch 1:{bar}").eta_s is None
    assert parse_progress(f"Epoch 1/3:{bar}").eta_s == 26.0
    assert parse_progress("step 2/5", rate=0.5).eta_s == 6.0


@pytest.mark.parametrize(
    "text",
    [
        *("a" * 100_000, "1" * 100_000, "━" * 100_000, " " * 100_000, "loss " * 20_000, "\0\x1b[A"),
        # With attempts from each character on, each of these would take half a minute.
        *("━" * 480 + " 12/34 0:0", "loss" + "a" * 490, "total step 3 " * 38),
    ],
)
def test_any_output_is_read(text: str) -> None:
    parse_progress("\n".join([text] * min(400, 2_000_000 // len(text))))


def test_the_newest_checkpoint_is_found_by_its_name_and_time(tmp_path: Path) -> None:
    since = time.time() - 100
    files = {
        "out/checkpoint-10/model.safetensors": 10,
        "out/checkpoint-20/model.safetensors": 20,
        "out/best.pt": 15,
        "out/notes.txt": 90,
        ".hidden/last.pt": 90,
        "runs/other/last.pt": 90,
        "old.ckpt": -10,
    }
    for name, moment in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (since + moment, since + moment))
    os.mkfifo(tmp_path / "out" / "pipe.pt")
    (tmp_path / "out" / "loop").symlink_to(tmp_path)
    found = newest_checkpoint([tmp_path], since, [tmp_path / "runs"])
    assert found is not None
    assert (found[0], round(found[1] - since)) == (str(tmp_path / "out/checkpoint-20"), 20)
    assert newest_checkpoint([tmp_path / "none"], since) is None


def test_the_folders_of_a_command_are_those_that_it_names(tmp_path: Path) -> None:
    assert named_folders(["python", "a.py", f"--out={tmp_path}", "--lr", "0.1", "x" * 5000]) == [tmp_path]


SCRIPT = """
import sys, time
print("step 30/40 | loss 0.1250", flush=True)
open(sys.argv[1] + "/step_30.pt", "w").close()
if sys.argv[2] == "dies":
    sys.exit(1)
"""


@pytest.mark.dist
@pytest.mark.parametrize("how", ["ends", "dies"])
def test_status_and_why_tell_what_a_script_has_printed_and_saved(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    words = ["exec", "--executor", "local", "--wait", "--", sys.executable, "train.py", "out", how]

    def toolkit(*words: str) -> str:
        argv = [sys.executable, "-m", "toolkit", *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True).stdout

    toolkit(*words)
    run = all_runs()[0].id
    (row,) = json.loads(toolkit("status", run, "--json"))
    assert (row["step"], row["total_steps"], row["loss"], row["printed"]["step"]) == (30, 40, 0.125, 30)
    assert "~30/40" in toolkit("status", run)
    why = toolkit("why", run)
    assert "step: 30 of 40, as read from its output" in why
    assert "its own newest checkpoint, by name and time: out/step_30.pt" in why


def test_a_large_folder_of_data_costs_the_file_server_a_bounded_number_of_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    class Entry:
        def __init__(self, number: int) -> None:
            self.name, self.path = f"shard-{number}.pt", str(tmp_path / f"shard-{number}.pt")

        def is_file(self, **_: bool) -> bool:
            return True

        def stat(self, **_: bool) -> os.stat_result:
            asked.append(tmp_path)
            return tmp_path.stat()

    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(map(Entry, range(1_000_000))))
    newest_checkpoint([tmp_path], 0.0)
    assert len(asked) <= 500
