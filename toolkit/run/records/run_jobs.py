"""Which jobs of Slurm are a run's.

A number does not say it. Each cluster has numbers of its own, and clusters may share a runs folder. A controller that
was installed anew gives the same numbers again. A copy of a run folder holds the numbers of the original's jobs. So
every question about a run's jobs, every signal and every cancellation passes here first.

A job is the run's if it is on the cluster that the run's files name, and if its batch script lies in the run's folder,
or in that of its sweep. A batch script of the user's own lies elsewhere: its job has recorded what Slurm calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from toolkit.base.errors import ToolkitError
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership
from toolkit.slurm import cluster_name
from toolkit.slurm.jobs import JobStatus

#: Returns the status of each job, None where Slurm does not know it.
ShowJobs: TypeAlias = Callable[[Sequence[str]], Mapping[str, JobStatus | None]]


@dataclass(frozen=True)
class RunJobs:
    """The jobs that a run's files name, the present one first, then those that wait to follow it."""

    run: RunDir
    ids: tuple[str, ...]
    cluster: str = ""  #: whose numbers they are; empty where it has no name
    sweep: str | None = None  #: the name of the run's sweep, else read from the run's files

    def is_elsewhere(self, here: str | None = None) -> bool:
        """True if the jobs are on another cluster than this one. ``here`` is this one's name, if it is known."""
        if not self.cluster:
            return False
        here = cluster_name.name_here() if here is None else here
        return bool(here) and here != self.cluster

    def ask(self, show_jobs: ShowJobs) -> dict[str, JobStatus | None]:
        """Return the status of each job; None for one that Slurm does not know, or gave its number to another job.

        Jobs of another cluster are missing, as those that are newer than the answer.
        """
        return self.among(show_jobs(self.ids)) if self.ids and not self.is_elsewhere() else {}

    def among(self, answers: Mapping[str, JobStatus | None]) -> dict[str, JobStatus | None]:
        """Return what these answers, of this cluster, say about the run's jobs, see :meth:`ask`."""
        known = {job: answers[job] for job in self.ids if job in answers}
        return {job: row if row is not None and self._has(job, row.command) else None for job, row in known.items()}

    def _has(self, job: str, command: str | None) -> bool:
        """True if the job with this number and this command is the run's. Most are known without reading a file."""
        if command is None:  # accounting does not tell
            return True
        scripts = _folder_of(command)
        if (self.sweep is not None and scripts == _arrays(self.run.path, self.sweep)) or scripts == self.run.submitit:
            return True
        owner, point = ownership.read(self.run, []), self.run.point([])
        if original_of(self.run, owner) is not None:
            return False
        # The folder may have another name here, or had one when the job was submitted.
        places = [self.run.path, *([Path(owner.path)] if owner is not None and owner.path else [])]
        sweep = self.sweep or (point and point.sweep)
        folders = [RunDir(place).submitit for place in places]
        folders += [_arrays(place, sweep) for place in places] if sweep else []
        if any(_is_same(scripts, folder) for folder in folders):
            return True
        return not sweep and self._is_users_own(job, command, owner)

    def _is_users_own(self, job: str, command: str, owner: OwnerRecord | None) -> bool:
        """True if the job has the user's batch script that the run was started by."""
        recorded = None if owner is None else owner.command
        if recorded is None and self.run.submission_path.exists():
            return False
        # The next job of the same script may have got the number: that one serves another run.
        with contextlib.suppress(ToolkitError):
            served = rundir.run_of_job(f"{self.cluster or 'slurm'}-{job}", self.run.path.parent.parent)
            if served is not None and not _is_same(served.path, self.run.path):
                return False
        if recorded is None:
            return True
        # Slurm's programs show a script's arguments in some versions only.
        shorter, longer = sorted((recorded, command), key=len)
        return f"{longer} ".startswith(f"{shorter} ")


def of(run: RunDir, damage: list[str] | None = None) -> RunJobs:
    """Return the jobs of a run; none for a copy of another run's folder."""
    owner, sent = ownership.read(run, damage), run.submission(damage)
    source = owner or sent or run.status(damage)
    ids = () if original_of(run, owner) is not None else ownership.jobs_of(run, damage)
    return RunJobs(run, tuple(ids), source.cluster)


def original_of(run: RunDir, owner: OwnerRecord | None) -> Path | None:
    """Return the folder of which the run's folder is a copy; None if it is none.

    That is where the owner took the run, if the same submission of the run is still there.
    """
    if owner is None or not owner.path or _is_same(Path(owner.path), run.path):
        return None
    there = ownership.read(RunDir(Path(owner.path)), [])
    return Path(owner.path) if there is not None and there.token == owner.token else None


@lru_cache(maxsize=64)
def _folder_of(command: str) -> Path:
    """Return the folder of a batch script. Cached: all points of a job array have the same one."""
    return Path(command).parent


def _arrays(run: Path, sweep: str) -> Path:
    """Return the folder of the batch scripts of a run's sweep."""
    return run.parent.parent.joinpath(".sweeps", sweep, "arrays")


def _is_same(one: Path, other: Path) -> bool:
    """True if both are one folder, perhaps under two names."""
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
