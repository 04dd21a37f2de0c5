"""The run folder: where each file of a run lies, how a run is made and how it is found again.

``runs/<name>/<run id>/`` holds everything about one run. The supervisor (or rank 0 of an unsupervised run) writes
``status.json``, ``attempts.jsonl`` and ``result.json``; everybody else only reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import fsio
from toolkit.errors import RunNotFoundError, nearest

RUN_DIR_VARIABLE = "TOOLKIT_RUN_DIR"
#: The number of the owner that a process belongs to, see `RunDir.belongs_to`.
OWNER_VARIABLE = "TOOLKIT_OWNER"
#: Says that every step is to be written down, and how to disturb the run: see toolkit.train.witness.
WITNESS_VARIABLE = "TOOLKIT_WITNESS"


def runs_root() -> Path:
    """The folder that holds all runs: ``$TOOLKIT_RUNS``, or ``runs`` in the current folder."""
    return Path(os.environ.get("TOOLKIT_RUNS") or "runs").absolute()


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and its small JSON files."""

    path: Path

    @property
    def id(self) -> str:
        """Time and eight random hex digits: newest last when sorted."""
        return self.path.name

    @property
    def name(self) -> str:
        """The config's name."""
        return self.path.parent.name

    @property
    def config(self) -> Path:
        """The resolved config, re-runnable."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """The copied sources."""
        return self.path / "code"

    @property
    def logs(self) -> Path:
        """Logs of the supervisor, and of the ranks by attempt."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files, and the same figures as JSON lines."""
        return self.path / "tensorboard"

    @property
    def bad_samples(self) -> Path:
        """The samples that could not be loaded and were replaced, one JSON line each."""
        return self.path / "bad_samples.jsonl"

    @property
    def skipped_steps(self) -> Path:
        """The steps that were left out, each with its samples, one JSON line each."""
        return self.path / "skipped_steps.jsonl"

    @property
    def strategy(self) -> Path:
        """What ``strategy.name: auto`` has taken, and why."""
        return self.path / "strategy.json"

    @property
    def witness(self) -> Path:
        """What `toolkit resume-check` compares, a file for each rank."""
        return self.path / "witness"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.path / "submitit"

    def attempt_logs(self, attempt: int) -> Path:
        """Logs and error files of one attempt's ranks."""
        return self.logs / f"attempt-{attempt:03d}"

    def rank_log(self, attempt: int, rank: int | str) -> Path:
        """Standard output and error of one rank. ``rank`` may be srun's pattern ``%t``."""
        return self.attempt_logs(attempt) / f"rank-{rank}.log"

    def error_file(self, attempt: int, rank: int) -> Path:
        """What a failing rank says about itself."""
        return self.attempt_logs(attempt) / f"error-{rank}.json"

    def status(self) -> dict[str, Any]:
        """``status.json``; an empty dict before the first start, or where a crash of the machine has torn it."""
        try:
            status = _read_replaced(self.path / "status.json")
        except ValueError:  # it is written each second and never flushed: a power cut may leave an empty file
            return {}
        return status if isinstance(status, dict) else {}

    def step(self) -> int:
        """The last step that rank 0 has told the supervisor; 0 before the first."""
        return (self.status().get("progress") or {}).get("step") or 0

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace ``status.json``; rewritten each second, so not flushed to disk."""
        fsio.write_json(self.path / "status.json", status, durable=False)

    def result(self) -> dict[str, Any] | None:
        """``result.json``, or None while the run has not ended; a damaged one is a result of state ``unreadable``."""
        try:
            result = _read_replaced(self.path / "result.json")
        except ValueError as error:
            result = error
        if result is None or (isinstance(result, dict) and "state" in result):
            return result
        why = f"{self.path / 'result.json'} is damaged: {result}"
        return {"state": "unreadable", "attempts": 0, "metrics": {}, "why": why}

    def write_result(self, result: dict[str, Any]) -> None:
        """Replace ``result.json``, durably."""
        fsio.write_json(self.path / "result.json", result)

    def clear_result(self) -> None:
        """A run that goes on has no result: whoever waits for one must not read the last one's."""
        (self.path / "result.json").unlink(missing_ok=True)

    def attempts(self) -> list[dict[str, Any]]:
        """The closed attempts, oldest first."""
        return fsio.read_json_lines(self.path / "attempts.jsonl")

    def add_attempt(self, line: dict[str, Any]) -> None:
        """Append a closed attempt, durably."""
        fsio.append_json_line(self.path / "attempts.jsonl", line)

    def owner(self) -> dict[str, Any]:
        """``owner.json``: who has the run now, see `toolkit.launch.ownership`; empty where nobody has, or damaged."""
        try:
            owner = _read_replaced(self.path / "owner.json")
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def write_owner(self, owner: Mapping[str, Any]) -> None:
        """Replace ``owner.json``, durably."""
        fsio.write_json(self.path / "owner.json", dict(owner))

    def take_number(self, number: int) -> bool:
        """Give the number of an owner away; False where somebody has it. Of two at the same moment one gets it."""
        path = fsio.make_dir(self.path / "owners") / str(number)
        try:
            os.close(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def last_number(self) -> int:
        """The highest number that was given away; 0 before the first."""
        return max((int(path.name) for path in (self.path / "owners").glob("*") if path.name.isdigit()), default=0)

    def taken_at(self, number: int) -> float:
        """When the number was given away, in seconds since the epoch."""
        return (self.path / "owners" / str(number)).stat().st_mtime

    def owner_number(self) -> int | None:
        """Return the number in ``owner.json``; None where it cannot be read."""
        try:
            number = self.owner().get("number")
        except OSError:
            return None
        return number if isinstance(number, int) else None

    def belongs_to(self, number: int) -> bool:
        """Whether nobody has taken the run after the owner of this number.

        A node that is cut off goes on working for a while after Slurm has started the job again elsewhere. When the
        network is back, it finds that it has been overtaken, and leaves everything as it is.
        """
        latest = self.owner_number()
        return latest is None or latest <= number

    def submission(self) -> dict[str, Any]:
        """How the run was last submitted: executor, job id, argv for the log; empty for the sbatch door."""
        return fsio.read_json(self.submitit / "submission.json") or {}


def _read_replaced(path: Path, tries: int = 3) -> Any | None:
    """:func:`fsio.read_json` of a file that another node may replace at this moment: NFS then says ESTALE, once."""
    for left in reversed(range(tries)):
        try:
            return fsio.read_json(path)
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise
    raise AssertionError("the last try returns or raises")


def create(name: str, root: Path | None = None) -> RunDir:
    """Make a new run folder with its sub-folders. Nobody else gets the same one, on whatever node they start."""
    parent = fsio.make_dir((root or runs_root()) / name)
    while True:
        run = RunDir(parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):  # mkdir is exclusive, on NFS too
            fsio.make_new_dir(run.path)
            break
    for folder in (run.logs, run.checkpoints, run.tensorboard, run.submitit):
        fsio.make_dir(folder)
    return run


def all_runs(root: Path | None = None) -> list[RunDir]:
    """Every run, oldest first."""
    found = (root or runs_root()).glob("*/*/config.yaml")
    return sorted((RunDir(path.parent) for path in found), key=lambda run: run.id)


def find(text: str, root: Path | None = None) -> RunDir:
    """The run that ``text`` names: a path, a run id, a unique prefix of one, or a config's name (its newest run).

    Raises RunNotFoundError that says what there is.
    """
    path = Path(text)
    if (path / "config.yaml").is_file():
        return RunDir(path.absolute())
    runs = all_runs(root)
    by_id = [run for run in runs if run.id.startswith(text)]
    if len(by_id) > 1:
        raise RunNotFoundError(f"{text!r} begins {len(by_id)} run ids: {', '.join(run.id for run in by_id[-5:])}")
    by_name = [run for run in runs if run.name == text]
    for found in (by_id, by_name[-1:]):
        if found:
            return found[0]
    raise RunNotFoundError(_not_found(text, runs, root or runs_root()))


def _not_found(text: str, runs: list[RunDir], root: Path) -> str:
    if not runs:
        return f"no run {text!r}: there are no runs under {root} (another folder: set TOOLKIT_RUNS)"
    names = sorted({run.name for run in runs})
    newest = ", ".join(f"{run.name}/{run.id}" for run in runs[-3:])
    return f"no run {text!r} under {root}; {nearest(text, names)}names: {', '.join(names)}; newest: {newest}"


# ---------------------------------------------------------------------------------- finding the run of a requeued job


def _job_file(root: Path, job: str) -> Path:
    return root / ".jobs" / job


def remember_job(run: RunDir, job: str) -> None:
    """Note which run a Slurm job serves. ``job`` is cluster, job id and array task in one word."""
    root = run.path.parent.parent
    fsio.make_dir(root / ".jobs")
    fsio.write_atomic(_job_file(root, job), str(run.path))


def run_of_job(job: str, root: Path | None = None) -> RunDir | None:
    """The run that a restarted job served before, or None."""
    try:
        path = Path(_job_file(root or runs_root(), job).read_text())
    except FileNotFoundError:
        return None
    return RunDir(path) if path.is_dir() else None
