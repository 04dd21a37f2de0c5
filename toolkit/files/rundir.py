"""The run folder: where its files are, how it is created and found.

``runs/<name>/<run id>/`` holds everything about one run. docs/design.md says who writes which of its files.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from toolkit.base import fsio, trust
from toolkit.base.errors import DamagedFileError, RunNotFoundError, TornFileError, did_you_mean
from toolkit.base.procfs import ProcessIdentity
from toolkit.files import records
from toolkit.files.run_files import (
    AttemptRecord,
    AttemptStatus,
    DependencyRecord,
    OwnerRecord,
    RunResult,
    RunStatus,
    RunUsage,
    Submission,
    SweepPoint,
)

#: The folder of the copies of the sources. It is hidden: tools of the project must not take them for the project's own.
COPIES = ".code"
RUN_DIR_VARIABLE = "TOOLKIT_RUN_DIR"
#: Holds attempt, rank and run folder of a rank that is a user's script; all that the script starts inherits it.
RANK_VARIABLE = "TOOLKIT_EXEC_RANK"
#: The number of the owner that a process belongs to, see `RunDir.belongs_to`.
OWNER_VARIABLE = "TOOLKIT_OWNER"
#: Asks the ranks to record every step, and says how to disturb the run: see `toolkit.train.step_digests`.
TRACE_VARIABLE = "TOOLKIT_TRACE"
#: The file that holds room for a run's last writes, and its size: an attempt, a status, a result and lines of a log.
_ROOM, _ROOM_BYTES = ".room", 1 << 15


def runs_root() -> Path:
    """Return the folder that holds this user's runs: ``$TOOLKIT_RUNS``, or ``runs`` in the current folder.

    If that belongs to another user and others may write into it, it is this user's own folder inside.
    """
    return trust.own_part(fsio.expand(os.environ.get("TOOLKIT_RUNS") or "runs").absolute())


class _Below:
    """A path in the run folder."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._place


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and its small JSON files."""

    path: Path

    config = _Below("config.yaml")  #: resolved, and can be run again
    logs = _Below("logs")  #: of the supervisor, and of the ranks by attempt
    checkpoints = _Below("checkpoints")  #: the committed ones
    tensorboard = _Below("tensorboard")  #: event files, and the same figures as JSON lines
    bad_samples = _Below("bad_samples.jsonl")  #: the replaced samples, which could not be loaded
    skipped_steps = _Below("skipped_steps.jsonl")  #: the steps that were left out, with their samples
    strategy = _Below("strategy.json")  #: what ``strategy.name: auto`` has chosen, and why
    trace = _Below("trace")  #: what `toolkit resume-check` compares, a file for each rank
    trackers = _Below("trackers")  #: what `toolkit upload` has sent, a file for each tracker and project
    submitit = _Below("submitit")  #: submitit's own files
    requests = _Below("requests")  #: what users ask of the run: all in one folder, so that one look finds it
    submission_path = _Below("submitit/submission.json")  #: how the run was last submitted
    after_path = _Below("after.json")  #: what the run waits for

    @property
    def id(self) -> str:
        """Return the run id: the time in UTC and eight random hex digits. Sorted, the newest is last."""
        return self.path.name

    @property
    def name(self) -> str:
        """Return the config's name."""
        return self.path.parent.name

    @property
    def code(self) -> Path:
        """Return the folder of the copied sources, the present copy if there are several."""
        return code_in(self.path)

    @property
    def code_number(self) -> int:
        """Return the number of the present copy of the sources. 1 is that of the submission."""
        try:
            target = str((self.path / COPIES / "now").readlink())
        except OSError:  # a run without a copy
            return 1
        return int(target) if re.fullmatch(r"[1-9]\d{0,5}", target) else 1

    def has_log_of(self, job_id: str, since: float | None, *others: Path) -> bool:
        """True if a job has written to its log, or one of ``others``, after ``since``. It does so at once."""
        logs = [*fsio.entries(self.submitit, f"{job_id}_*_log.*"), self.logs / f"follow-up-{job_id}.out", *others]
        return any(fsio.is_there(log) and log.stat().st_mtime >= (since or 0.0) for log in logs)

    def make_requests(self) -> None:
        """Make the folder of requests if it is not there. One that root makes must not keep out the run's own user."""
        folder, owner = fsio.make_dir(self.requests, parents=0), self.path.stat().st_uid
        if owner != os.geteuid():
            os.chown(folder, owner, -1)

    def attempt_logs(self, attempt: int) -> Path:
        """Return the folder of logs and error files of one attempt's ranks."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int | str) -> Path:
        """Return the file of one rank's standard output and error. ``rank`` may be srun's pattern ``%t``."""
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def rank_tag(self, attempt: int, rank: int | str) -> str:
        """Return the value of ``RANK_VARIABLE`` for a rank."""
        return f"{attempt}/{rank}/{self.path}"

    def error_file(self, attempt: int, rank: int) -> Path:
        """Return the file of a failing rank's report, see `toolkit.files.error_file`."""
        return self.attempt_logs(attempt) / f"error-{rank}.json"

    def status(self) -> RunStatus:
        """Return ``status.json``. It is empty before the first start. Raises DamagedFileError, as all that follow.

        It is never flushed to disk, so a node that dies may tear it. The run then continues from an empty one, whose
        ``why`` says so.
        """
        try:
            return RunStatus.read(self.path / "status.json") or RunStatus()
        except TornFileError as error:
            records.warn_once(str(error))
            return RunStatus(why=str(error))

    def point(self) -> SweepPoint | None:
        """Return the run's point in its sweep; None for a run that belongs to none."""
        return SweepPoint.read(self.path / "point.json")

    def dependencies(self) -> DependencyRecord | None:
        """Return what the run waits for before it starts, or None."""
        return DependencyRecord.read(self.after_path)

    def interrupted_status(self) -> AttemptStatus | None:
        """Return the status of an attempt that was never closed, or None. Its supervisor died before it did so.

        `toolkit resume` replaces the status, and keeps such a one as a part of the new one.
        """
        status = self.status()
        left = status.interrupted or status
        is_open = left.attempt and all(line.attempt != left.attempt for line in self.attempts())
        return left if is_open else None

    def step(self) -> int:
        """Return the last step that rank 0 has reported to the supervisor. It is 0 before the first report."""
        return self.status().progress.step or 0

    def write_status(self, status: RunStatus) -> None:
        """Replace ``status.json``. It is rewritten every few seconds, so not flushed to disk."""
        fsio.write_json(self.path / "status.json", status.to_json(), durable=False)

    def result(self) -> RunResult | None:
        """Return ``result.json``, or None while the run has not ended."""
        return RunResult.read(self.path / "result.json")

    def remove(self) -> None:
        """Remove the run. Its name changes first: a removal that is killed leaves no half of a run in the listings."""
        fsio.remove_as(self.path, self.path.with_name(f".removed-{self.id}"))

    def reserve_space(self) -> None:
        """Hold room on the disk for the last writes of the run, if there is any now."""
        with contextlib.suppress(OSError):
            fsio.write_atomic(self.path / _ROOM, os.urandom(_ROOM_BYTES))  # what compresses would hold none

    def release_space(self) -> None:
        """Free the held room. A run that has trained to its end is not lost because the disk is full."""
        (self.path / _ROOM).unlink(missing_ok=True)

    def write_result(self, result: RunResult) -> None:
        """Replace ``result.json``, durably."""
        self.release_space()
        fsio.write_json(self.path / "result.json", result.to_json())

    def clear_result(self) -> None:
        """Remove the result of a run that continues. A waiting program must not read the previous one."""
        (self.path / "result.json").unlink(missing_ok=True)

    def attempts(self) -> list[AttemptRecord]:
        """Return the closed attempts, oldest first."""
        return AttemptRecord.read_lines(self.path / "attempts.jsonl")

    def next_attempt(self, closed: Sequence[AttemptRecord]) -> int:
        """Return a number that no attempt has had. An attempt whose line is missing counts, too.

        ``closed`` are :meth:`attempts`. Attempts that shared a number would share their logs and error files.
        """
        return max(self.attempts_with_logs() | {line.attempt for line in closed}, default=0) + 1

    def attempts_with_logs(self) -> set[int]:
        """Return the numbers of the attempts that have written logs."""
        named = [path for path in fsio.entries(self.logs) if re.fullmatch(r"attempt-[0-9]{3,9}", path.name)]
        return {int(path.name[len("attempt-") :]) for path in named if fsio.entries(path)}

    def add_attempt(self, line: AttemptRecord) -> None:
        """Append a closed attempt, durably."""
        fsio.append_json_line(self.path / "attempts.jsonl", line.to_json())

    def usage(self) -> RunUsage:
        """Return ``usage.json``; empty where nothing was measured. It may be torn, as the status."""
        try:
            return RunUsage.read(self.path / "usage.json") or RunUsage()
        except TornFileError as error:
            records.warn_once(str(error))
            return RunUsage()

    def write_usage(self, usage: RunUsage) -> None:
        """Replace ``usage.json``. It is rewritten every minute, so not flushed to disk."""
        fsio.write_json(self.path / "usage.json", usage.to_json(), durable=False)

    def owner(self) -> OwnerRecord | None:
        """Return ``owner.json``: who has the run now. None if there is no owner. See `run.records.ownership`."""
        return OwnerRecord.read(self.path / "owner.json")

    def write_owner(self, owner: OwnerRecord) -> None:
        """Replace ``owner.json``, durably."""
        fsio.write_json(self.path / "owner.json", owner.to_json())

    def claim_owner_number(self, number: int, mark: str | None = None) -> bool:
        """Take the number of an owner; False if it is taken. Of two processes at the same moment one gets it.

        A file server may do this and lose its answer. Another call with the same ``mark`` then finds its own number.
        """
        path = fsio.make_dir(self.path / "owners", parents=0) / str(number)
        return fsio.create_once(path, f"{ProcessIdentity.of(os.getpid())} {mark or secrets.token_hex(4)}")

    def release_owner_number(self, number: int) -> None:
        """Free the number of an owner that could not be recorded."""
        (self.path / "owners" / str(number)).unlink(missing_ok=True)

    def last_owner_number(self) -> int:
        """Return the highest number that was taken; 0 before the first."""
        names = (path.name for path in fsio.entries(self.path / "owners"))
        return max((int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)), default=0)

    def owner_number(self) -> int | None:
        """Return the number in ``owner.json``; None if it cannot be read."""
        try:
            owner = self.owner()
        except (OSError, DamagedFileError):
            return None
        return None if owner is None else owner.number

    def belongs_to(self, number: int) -> bool:
        """True if no other owner has taken the run after the owner of this number.

        A node without a network works for a while after Slurm has started the job again elsewhere. When the network is
        back it must change nothing.
        """
        latest = self.owner_number()
        return latest is None or latest <= number

    def submission(self) -> Submission | None:
        """Return how the run was last submitted: executor, job id, host. None for a user's own batch script."""
        return Submission.read(self.submission_path)

    def write_submission(self, submission: Submission) -> None:
        """Replace ``submission.json``, durably."""
        fsio.write_json(self.submission_path, submission.to_json())


def create(name: str, root: Path | None = None) -> RunDir:
    """Make a new run folder with its sub-folders. No other process on any node gets the same one.

    Raises RequestError if others could replace it.
    """
    parent = fsio.make_dir(make_root(root or runs_root()) / name)
    trust.refuse_untrusted(parent, "the folder for runs, TOOLKIT_RUNS")  # exists now: no other user can make it first
    while True:
        run = RunDir(parent / f"{id_time(time.time())}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):  # mkdir is exclusive, on NFS too
            fsio.make_new_dir(run.path)
            break
    for folder in (run.logs, run.checkpoints, run.tensorboard, run.submitit):
        fsio.make_dir(folder)
    return run


def make_root(root: Path) -> Path:
    """Make the folder for runs if it is not there. A new one is left out by git, with all that comes into it."""
    if not root.is_dir():
        fsio.make_dir(root)
        fsio.write_atomic(root / ".gitignore", "*\n")
    return root


def id_time(moment: float) -> str:
    """Return a time as run ids begin with it, in UTC. Local time goes back in autumn, and may differ between nodes."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(moment))


def time_of_id(run_id: str) -> float | None:
    """Return the time that :func:`id_time` put into a run's id: that of its first submission."""
    try:
        return datetime.fromisoformat(f"{run_id[:8]}T{run_id[9:15]}+00:00").timestamp()
    except ValueError:
        return None


def code_in(folder: Path) -> Path:
    """Return the present copy of the sources in the folder of a run or a sweep."""
    return folder / COPIES / "now"


def link_code(folder: Path, target: str) -> None:
    """Make ``target`` the present copy of the sources, at one moment. It is a path relative to ``COPIES``."""
    link = fsio.make_dir(folder / COPIES) / f"next-{secrets.token_hex(4)}"
    link.symlink_to(target)
    link.replace(folder / COPIES / "now")


def refuse_untrusted_code(run: RunDir) -> None:
    """Raise RequestError if others may change the sources of ``run``. They are about to run as this user."""
    for path in (run.path, run.code, run.config):
        trust.refuse_untrusted(path, f"run {run.id} would run its sources as you (--trust allows its owner's)")


def all_runs(root: Path | None = None) -> list[RunDir]:
    """Return every run, oldest first. A run without a config counts if it has started, or cannot be read.

    Raises OSError where the disk does not say what there is.
    """
    # os.path and texts: there may be 10,000 runs, and a Path takes ten times as long.
    found: list[tuple[str, str]] = []
    for _, name in _folders(str(root or runs_root())):
        with contextlib.suppress(PermissionError):  # another user's, or lost+found
            found += _folders(name)
    return [RunDir(Path(path)) for run_id, path in sorted(found) if _is_run(run_id, path)]


def _folders(path: str) -> list[tuple[str, str]]:
    """Return names and paths of the folders in ``path``."""
    try:
        with os.scandir(path) as entries:
            return [(entry.name, entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_run_id(name: str) -> bool:
    """True if a folder of this name may be a run."""
    return re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", name) is not None


def _is_run(run_id: str, path: str) -> bool:
    signs = ("config.yaml", "status.json", "result.json", "owner.json") if is_run_id(run_id) else ("config.yaml",)
    for name in signs:
        try:
            os.stat(f"{path}/{name}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # its row says so
            return is_run_id(run_id)
        return True
    return False


def find(text: str, root: Path | None = None) -> RunDir:
    """Return the run that ``text`` names.

    That is a path, a run id, a unique prefix of one or its last eight digits, ``name/id``, or a config's name (its
    newest run). Raises RunNotFoundError that says what there is; also for a name that means all points of a sweep.
    """
    if not text:
        raise RunNotFoundError("the name of a run is empty; is a variable of your shell unset?")
    path = Path(text)
    # A script under torchrun with TOOLKIT_RUN_DIR has a folder of any name, and no config.
    if any((path / name).is_file() for name in ("config.yaml", "owner.json")):
        return RunDir(path.absolute())
    runs = all_runs(root)
    by_id = [run for run in runs if run.id.startswith(text) or text in (run.id[-8:], f"{run.name}/{run.id}")]
    if len(by_id) > 1:
        raise RunNotFoundError(f"{text!r} names {len(by_id)} runs: {', '.join(run.id for run in by_id[-5:])}")
    if by_id:  # an id counts before a name
        return by_id[0]
    by_name: Sequence[RunDir] = [run for run in runs if run.name == text]
    root = root or runs_root()
    if (root / SWEEPS).is_dir():
        from toolkit.plugins.sweep.sweep_folder import single_runs

        by_name = single_runs(text, by_name, root)
    if by_name:
        return by_name[-1]
    if not runs:
        why = f"no run {text!r}: there are no runs under {root} (another folder: set TOOLKIT_RUNS)"
    else:
        names = sorted({run.name for run in runs})
        newest = ", ".join(f"{run.name}/{run.id}" for run in runs[-3:])
        why = f"no run {text!r} under {root}; {did_you_mean(text, names)}names: {', '.join(names)}; newest: {newest}"
    raise RunNotFoundError(why)


#: The folder of the sweeps among the runs.
SWEEPS = ".sweeps"


def sweep_paths(root: Path | None = None) -> list[Path]:
    """Return the folder of every sweep."""
    return sorted(path.parent for path in ((root or runs_root()) / SWEEPS).glob("*/sweep.json"))


# ---------------------------------------------------------------------------------- finding the run of a requeued job


def remember_job(run: RunDir, job: str) -> None:
    """Note which run a Slurm job serves. ``job`` is cluster, job id and array task in one word."""
    folder = fsio.make_dir(run.path.parent.parent / ".jobs", parents=0)
    fsio.write_atomic(folder / job, str(run.path))


def run_of_job(job: str, root: Path | None = None) -> RunDir | None:
    """Return the run that a restarted job served before. None if it served none, or that run was removed.

    Raises DamagedFileError if that cannot be read: a new run would throw the old one away silently.
    """
    file = (root or runs_root()) / ".jobs" / job
    try:
        text = os.fsdecode(fsio.read_bytes(file))
    except FileNotFoundError:
        return None
    if not text.isprintable() or not Path(text).is_absolute():
        raise DamagedFileError(
            f"{file} is damaged: it holds no path of a run, so what job {job} served is not known; look for the run "
            "with `toolkit status`, and continue it with `toolkit resume RUN`"
        )
    # The run may have been removed since.
    run = RunDir(Path(text))
    if not fsio.is_there(run.path):
        return None
    trust.refuse_untrusted(run.path, f"the run of job {job}")
    return run
