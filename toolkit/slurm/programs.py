"""Runs one of Slurm's programs, and tells its refusals from its silence."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from toolkit.base import signals
from toolkit.base.errors import SlurmError, SlurmRefusedError, listing, nearest, shortened

#: Seconds for one program: enough for a busy controller, and bearable for a user who waits. Without a readable
#: SLURM_CONF Slurm's programs retry for 60 s before they fail.
TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0


class _ProgramError(SlurmError):
    """A program of Slurm ended with an exit code other than 0."""

    def __init__(self, argv: Sequence[str], code: int, stderr: str) -> None:
        self.stderr = stderr
        words = shortened("\n  ".join(stderr.strip().splitlines()[-5:]), 2000) or "(nothing on stderr)"
        super().__init__(f"`{_shown(argv)}` failed with exit code {code}:\n  {words}{advice_on(stderr)}")

    def says(self, words: str) -> bool:
        return words.lower() in self.stderr.lower()


class ProgramRefusedError(_ProgramError, SlurmRefusedError):
    """The controller answered and refused."""


class NoAnswerError(SlurmError):
    """The controller did not answer. What it was asked for may have happened, if ``is_sent``."""

    is_sent = True


class _FailedWithoutAnswerError(_ProgramError, NoAnswerError):
    """The controller restarts, is overloaded, or cannot be reached over the network."""

    @property
    def is_sent(self) -> bool:  # type: ignore[override]
        return not any(self.says(words) for words in _NOT_SENT)


#: What Slurm's programs print when no daemon could be reached (slurm_errno.c, 22.05 to 25.11).
_NO_ANSWER = (
    "Unable to contact slurm controller",
    "Unable to contact slurm database",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "Connection refused",
    "Connection reset",
    "slurm_receive_msg",
    "in standby mode",
    "Protocol authentication error",
    "Rate limit exceeded",
)
_PARTITION = "invalid partition"
#: Those of them after which nothing was sent.
_NOT_SENT = ("Unable to contact slurm controller", "Connection refused")
#: Advice for the most frequent failures, by what Slurm prints.
_ADVICE = (
    ("Unable to contact slurm controller", "the controller is down or unreachable: `scontrol ping`, or ask the site"),
    ("Could not establish a configuration source", "set SLURM_CONF to the cluster's slurm.conf"),
    ("Invalid account", "name one of `sacctmgr show associations user=$USER` as cluster.account in the site defaults"),
    (_PARTITION, "name one of `sinfo --summarize` as cluster.partition"),
    ("Requested node configuration is not available", "ask for less: `sinfo -o '%P %D %c %m %G'` shows what there is"),
    ("Invalid generic resource", "`sinfo -o '%P %G'` shows what there is; shard and mps do not go with gpu in one job"),
    ("Requested topology", "cluster.segment must divide nodes with spares, and fit a block: `scontrol show topology`"),
    ("option '--segment", "leave cluster.segment out, which is new in Slurm 24.05: ranks are placed by blocks anyway"),
    ("Job violates accounting/QOS policy", "the account's limits are reached: `sacctmgr show qos`, or ask for less"),
    ("presently disabled", "the job was submitted with --no-requeue, or the site forbids requeueing (JobRequeue=0)"),
)  # fmt: skip


def advice_on(stderr: str) -> str:
    """Return what to do about a failure of Slurm's, as a line to append; empty where it is not known."""
    found = next((advice for words, advice in _ADVICE if words.lower() in stderr.lower()), None)
    if _PARTITION in stderr.lower() and (names := _partitions()):
        wrong = re.search(r"specified: (\S+)", stderr)
        found = f"{nearest(wrong[1], names) if wrong else ''}cluster.partition is one of {listing(names)}"
    return f"\nWhat to do: {found}" if found else ""


def _partitions() -> list[str]:
    """Return the names of the partitions; none where Slurm does not answer."""
    with suppress(SlurmError):
        return run_program(["sinfo", "--noheader", "--format=%R"], 10.0, os.environ).split()
    return []


def _shown(argv: Sequence[str]) -> str:
    return " ".join([argv[0].rpartition("/")[2], *argv[1:]])


def run_program(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> str:
    """Return the program's stdout. It gets no stdin: a program that asks a question would wait for ever.

    A signal that Slurm sends to all processes of a job is not for it: a requeue must not fail because of that.
    """
    try:
        with signals.kept_from_children(signals.END_SIGNALS):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environ,
                start_new_session=True,
            )
    except OSError as error:
        raise SlurmError(f"`{_shown(argv)}` could not be started: {error}") from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise NoAnswerError(
                f"`{_shown(argv)}` did not answer within {timeout_s:g} s: the controller is busy or unreachable, "
                "SLURM_CONF cannot be read, or the job has no running step to signal; try `scontrol ping` and `squeue`"
            ) from error
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        # Death by a signal is no answer either.
        is_silent = process.returncode < 0 or any(words in stderr for words in _NO_ANSWER)
        raise (_FailedWithoutAnswerError if is_silent else ProgramRefusedError)(argv, process.returncode, stderr)
    return stdout
