"""The end of one log. Which line counts, from which rank it is, and how little is read."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from toolkit.base.tracebacks import TAIL_BYTES, tail_of_file, tail_of_stream
from toolkit.plugins.report.why.diagnosis import cause_of_file, cause_of_text
from toolkit.plugins.report.why.page import last_lines

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RESET = "RuntimeError: [3] is setting up NCCL: Connection reset by peer"


def named(text: str) -> str | None:
    found = cause_of_text(text)
    return found.rule if found else None


def test_the_cause_counts_and_not_what_follows_from_it() -> None:
    assert named(f"{RESET}\n{OOM}\nsrun: error: n1: task 0: Exited with exit code 1") == "cuda.oom"
    assert named(f"{OOM}\n{RESET}") == "cuda.oom"


def test_a_secondary_rank_says_that_another_rank_is_the_cause() -> None:
    found = cause_of_text(RESET)
    assert found is not None
    assert found.rule == "peer.closed"
    assert found.is_consequence
    assert found.to_json()["is_consequence"] is True


def test_of_two_errors_of_one_tier_the_earlier_counts() -> None:
    assert named("KeyError: 'a'\nIndexError: list index out of range") == "py.key"
    assert named("IndexError: list index out of range\nKeyError: 'a'") == "py.index"


def test_an_error_before_many_later_steps_did_not_end_the_job() -> None:
    steps = [f"step {number}/900 loss 1.9{number}" for number in range(8)]
    assert named("\n".join([OOM, *steps])) is None
    assert named("\n".join([*steps, OOM])) == "cuda.oom"


def test_ordinary_and_empty_logs_have_no_cause() -> None:
    assert named("") is None
    assert named("step 1 loss 2.0\ncompleted after 400 steps\n") is None


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (f"[rank3]: {OOM}", 3),
        (f"[default3]:{OOM}", 3),
        (f"[1,3]<stderr>:{OOM}", 3),
        (f"3: {OOM}", 3),
        (OOM, None),
    ],
)
def test_the_rank_is_told_from_the_launchers_label(line: str, rank: int | None) -> None:
    found = cause_of_text(f"{line}\n")
    assert found is not None
    assert (found.rank, found.line) == (rank, OOM)


def test_the_host_is_told_from_a_line_of_srun() -> None:
    found = cause_of_text("srun: error: node7: task 12: Out Of Memory")
    assert found is not None
    assert (found.rule, found.host) == ("host.oom_kill", "node7")


def test_the_frame_is_the_users_own_and_not_a_librarys() -> None:
    found = cause_of_text(
        "Traceback (most recent call last):\n"
        '  File "/w/jobs/mine.py", line 42, in forward\n    x = self.up(x)\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in _call_impl\n'
        f"{OOM}\n"
    )
    assert found is not None
    assert found.where == "mine.py:42 in forward"


def test_colours_carriage_returns_and_any_bytes_do_no_harm(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\xff\xfe\x00\x80 junk\r 10%|#\r\x1b[31m" + OOM.encode() + b"\x1b[0m\r\n\xc3\x28")
    found = cause_of_file(log)
    assert found is not None
    assert (found.rule, found.line, found.log) == ("cuda.oom", OOM, str(log))


def test_of_a_huge_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with log.open("wb") as file:
        file.write(b"KeyError: 'a'\n")
        os.truncate(log, 10 << 30)  # a hole: no disk holds it
        file.seek(0, os.SEEK_END)
        file.write(OOM.encode())
    assert len(tail_of_file(log)) == TAIL_BYTES
    found = cause_of_file(log)
    assert found is not None
    assert found.rule == "cuda.oom"


class Pipe(io.BytesIO):
    """A stream that cannot seek."""

    def seekable(self) -> bool:
        return False


def test_of_a_pipe_the_end_is_kept() -> None:
    assert tail_of_stream(Pipe(b"x" * (3 * TAIL_BYTES) + b"the end")).endswith("the end")
    assert len(tail_of_stream(Pipe(b"x" * (3 * TAIL_BYTES)))) == TAIL_BYTES


def test_a_hit_deep_in_a_long_line_is_shown() -> None:
    found = cause_of_text("x" * 1500 + OOM)
    assert found is not None
    assert OOM[:30] in found.line
    assert len(found.line) <= 300


def test_last_lines_leave_out_empty_ones() -> None:
    assert last_lines("a\n\n b \r\n\n\x1b[1mc\n\n", 2) == [" b", "c"]
