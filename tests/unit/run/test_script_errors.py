"""What is known of a script's end by the log of its rank."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.base import fsio, tracebacks
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.error_files import complete_failures, error_from_log, exception_at_end, read_error_files
from toolkit.run.attempt.verdict import RankFailure, first_failure

HEAD = 'Traceback (most recent call last):\n  File "/p/train.py", line 4, in load\n    raise error\n'
#: The end of a torchrun whose child has raised HEAD's exception.
TORCHRUN = (
    "E1127 10:00:00.1 7 torch/distributed/elastic/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 7) of python\n"
    "Traceback (most recent call last):\n"
    '  File "/v/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    '  File "/v/lib/python3.11/site-packages/torch/distributed/run.py", line 918, in main\n    run(args)\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "============================================================\ntrain.py FAILED\n"
    "------------------------------------------------------------\nFailures:\n  <NO_OTHER_FAILURES>\n"
)
BAR = "from tqdm import tqdm\nbar = tqdm(total=9)\nfor n in range(9):\n  bar.update()\n"


def of_script(source: str, tmp_path: Path, *words: str) -> tuple[str, int]:
    """Return what a script prints, and its exit code."""
    path = tmp_path / "train.py"
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, str(path), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60
    )
    return tracebacks.clean(done.stdout.decode(errors="replace")), done.returncode


@pytest.mark.parametrize(
    ("source", "how", "place"),
    [
        ("def f():\n  raise ValueError('no such key')\nf()", "ValueError: no such key", "line 2, in f"),
        ("import struct\nstruct.unpack('i', b'')", "struct.error: unpack requires a buffer of 4 bytes", "line 2"),
        ("x = (\ny = 1", "SyntaxError: '(' was never closed", "line 1"),
        ("try:\n  {}['a']\nexcept KeyError:\n  raise OSError('no file')", "OSError: no file", "line 4, in <module>"),
        ("class A:\n  def __del__(self):\n    1/0\na = A()\nraise MemoryError", "MemoryError", "line 5"),
        (
            "import traceback\ntry:\n  1/0\nexcept ZeroDivisionError:\n  traceback.print_exc()\nexit('no c')",
            "ZeroDivisionError: division by zero; then it printed: no c",
            "line 3",
        ),
        (
            "import traceback\ntry:\n  1/0\nexcept ZeroDivisionError:\n  traceback.print_exc()\n"
            "for n in range(40):\n  print('epoch', n)\nraise SystemExit(1)",
            "exit code 1; it printed last: epoch 39",
            None,
        ),
        ("raise SystemExit('config nothere.yaml is not there')", "exit code 1; it printed last: config nothere", None),
        ("import argparse\nargparse.ArgumentParser().parse_args()", "train.py: error: unrecognized", None),
        ("raise SystemExit(3)", None, None),
        # A progress bar that is updated by hand ends in no line break, and one is drawn once more at the end.
        (f"{BAR}  if n == 5: raise ValueError('bad')", "ValueError: bad", "line 5"),
        (f"{BAR}raise SystemExit('no')", "exit code 1; it printed last: no", None),
        (f"{BAR}raise SystemExit(1)", None, None),
        # torch labels each line where a process group is open, behind a bar, too.
        (
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            f"{BAR}  if n == 5: raise ValueError('bad')",
            "ValueError: bad",
            "line 7",
        ),
    ],
    ids=lambda value: None if value is None else value[:20],
)
def test_the_exception_that_left_a_script_is_told_from_its_output(
    source: str, how: str | None, place: str | None, tmp_path: Path
) -> None:
    report = error_from_log(*of_script(source, tmp_path, "--foo"))
    assert str(report.get("message", "")).startswith(how or ""), report
    assert bool(report) == (how is not None)
    assert bool(report.get("comes_again")) == (how is not None and "unrecognized" in how)
    assert (place is None) == ("traceback" not in report)
    assert place is None or place in str(report["traceback"])


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (f"{HEAD}ValueError: bad\n{TORCHRUN}", "ValueError: bad"),
        (f"{HEAD}ValueError: bad\n{HEAD}RuntimeError: Connection closed by peer [10.0.0.1]:3\n", "ValueError: bad"),
        (f"{HEAD}RuntimeError: Connection closed by peer [10.0.0.1]:3\n", "RuntimeError: Connection closed by peer"),
        (
            f"{HEAD}ValueError: Caught ValueError in DataLoader worker\nOriginal {HEAD}ValueError: bad\n",
            "ValueError: bad",
        ),
        (f"\x1b[31m{HEAD}\x1b[0mValueError: bad\x1b[0m\r\nwandb: Find logs at ./wandb\n", "ValueError: bad"),
        (
            "Usage: t [OPTIONS]\nTry 't --help' for help.\n\nError: No such option: --foo\n",
            "Error: No such option: --foo",
        ),
        ("usage: t\nkilled\n", "exit code 2; it printed last: killed"),
        (HEAD, "exit code 2; it printed last: Traceback"),
        (f" 60%|##  | 3/5 [00:00<00:00, 9.1it/s]{HEAD}ValueError: bad\n", "ValueError: bad"),
        (f" 60%|##  | 3/5 [00:00<00:00, 9.1it/s]\r{HEAD}ValueError: bad\n", "ValueError: bad"),
        (f"2026-11-20 15:00:00 ERROR root {HEAD}ValueError: bad\n", "ValueError: bad"),
        (
            f"[1,3]<stderr>:[rank3]: {HEAD.replace(chr(10), chr(10) + '[1,3]<stderr>:[rank3]: ')}ValueError: bad\n",
            "ValueError: bad",
        ),
        ("\0\0\x01\x02 --- \n\n", ""),
    ],
)
def test_other_processes_colours_and_junk_do_not_hide_it(text: str, how: str) -> None:
    message = str(error_from_log(tracebacks.clean(text), 2).get("message", ""))
    assert message.startswith(how)
    assert "then it printed" not in message


def test_of_several_ranks_the_root_is_named_by_the_end_of_a_log_of_any_size(run: RunDir, tmp_path: Path) -> None:
    attempt = Attempt(1, time.time(), Allocation(("a", "b"), (2, 1), 1))
    fsio.make_dir(run.attempt_logs(1))
    with run.rank_log(1, 0).open("wb") as log:
        log.truncate(200 << 20)  # a hole, as of a log of 200 MB
        log.seek(0, 2)
        log.write(b"\xff\xfe junk\n" + f"{HEAD}ValueError: bad s3cr3t-value\n".encode())
    run.rank_log(1, 1).write_text(f"{HEAD}RuntimeError: Connection closed by peer [10.0.0.1]:3\n")
    secret = tmp_path / "token"
    secret.write_text("s3cr3t-value\n")
    secret.chmod(0o600)
    codes = [(0, 11.0, 1), (1, 10.0, 1), (2, 10.5, 1)]  # the peer is seen to end first; rank 2 has no log
    attempt.fail(*(RankFailure(rank, "a", f"exit code {code}", at, exit_code=code) for rank, at, code in codes))
    attempt.fail(RankFailure(None, "a", "the store host ended", 12.0))
    attempt.replace_failures(complete_failures(run, attempt, {"TOKEN": str(secret)}))
    reports = read_error_files(run.attempt_logs(1))
    first = first_failure([*reports, attempt.failures[2]])
    assert (first.rank, first.how, first.where) == (0, "ValueError: bad [secret TOKEN]", "train.py:4 in load")
    assert [(failure.rank, failure.how) for failure in attempt.failures[2:]] == [
        (2, "exit code 1"),
        (None, "the store host ended"),
    ]
    # What a rank has reported itself is left as it is.
    before = run.error_file(1, 0).read_bytes()
    run.rank_log(1, 0).write_text(f"{HEAD}KeyError: 'x'\n")
    complete_failures(run, attempt, {})
    assert run.error_file(1, 0).read_bytes() == before


def test_the_line_at_which_a_python_under_a_shell_has_aborted_is_named(tmp_path: Path) -> None:
    run = rundir.create("script", tmp_path / "runs")
    script = tmp_path / "train.py"
    script.write_text("import os\n\ndef step():\n    os.abort()\n\nstep()\n")
    shell = tmp_path / "train.sh"
    shell.write_text(f"{sys.executable} -X faulthandler {script}\nexit $?\n")
    fsio.make_dir(run.attempt_logs(1))
    with run.rank_log(1, 0).open("wb") as log:
        done = subprocess.run(["bash", str(shell)], stdout=log, stderr=log, check=False, timeout=60)
    assert done.returncode == 134
    attempt = Attempt(1, time.time(), Allocation(("a",), (1,), 1))
    attempt.fail(RankFailure(0, "a", "exit code 134", 1.0, exit_code=134))
    (failure,) = complete_failures(run, attempt, {})
    assert failure.where == "train.py:4 in step"
    assert failure.how.startswith("exit code 134; it printed last: ")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"hello\n{HEAD}ValueError: x\n", "the log of rank 1 ends in ValueError: x"),
        (f"{HEAD}ValueError: x\nwent on without it\n", ""),
        (f"Exception ignored in: <f>\n{HEAD}ValueError: x\n", ""),
        (f"{HEAD.replace('/p/train.py', '/py/multiprocessing/resource_tracker.py')}KeyError: '/psm'\n", ""),
        ("step 1 loss 2.0\n", ""),
    ],
)
def test_an_exception_at_the_end_of_a_log_is_seen_although_the_exit_code_was_0(
    log: str, said: str, run: RunDir
) -> None:
    attempt = Attempt(1, time.time(), Allocation(("a",), (2,), 1))
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 1).write_text(log)
    assert exception_at_end(run, attempt, {}) == said
