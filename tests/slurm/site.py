"""A user at the login node of the box."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.box import Box
from tests.waiting import wait_for
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership

START_S = 60
END_S = 240


@dataclass(frozen=True)
class Site:
    """A user at the box's login node, with a runs folder of their own."""

    box: Box
    folder: Path

    @property
    def user(self) -> str | None:
        """Strict sites have unprivileged users."""
        return "alice" if self.box.spec.strict else None

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run(self, *argv: str, cwd: Path | None = None, timeout: float = END_S, check: bool = True, **env: str) -> str:
        variables = {"TOOLKIT_RUNS": str(self.runs), **env}
        done = self.box.run(argv, cwd=cwd, env=variables, timeout=timeout, check=check, user=self.user)
        return done.stdout + done.stderr

    def sbatch(self, *argv: str) -> str:
        """Submit with ``sbatch``, logs into our folder; the job id."""
        out = self.run("sbatch", "--parsable", f"--output={self.folder}/slurm-%j.out", *argv)
        return out.split()[-1]

    def submit(self, *argv: str) -> str:
        return self.run("toolkit", "submit", *argv)

    def find(self, name: str) -> RunDir:
        return rundir.find(name, self.runs)

    def only_run(self) -> RunDir:
        def only() -> RunDir | None:
            runs = rundir.all_runs(self.runs)
            return runs[0] if runs else None

        return wait_for(only, START_S, "a run folder")

    def result(self, name: str) -> RunResult:
        result = self.find(name).result()
        assert result is not None
        return result

    def processes(self) -> list[tuple[int, str]]:
        """What of ours is alive on any node."""
        return [
            (pid, command)
            for pid, command in self.box.processes()
            if any(word in command for word in ("toolkit", "submitit", str(self.folder)))
        ]

    def ranks(self, node: str | None = None, command: str = "toolkit run") -> list[int]:
        """Processes that train, on one node or on all. Their srun, a process twice, has their command in its own."""
        found = self.box.processes(node)
        return [pid for pid, line in found if command in line and Path(line.split()[0]).name.startswith("python")]

    def preempt(self, seconds: int = 2) -> str:
        """A job of the higher partition takes all nodes for a while; its job id."""
        what = ["--nodes=4", "--exclusive", "--partition=high", "--output=/dev/null", f"--wrap=sleep {seconds}"]
        return self.box.run(["sbatch", "--parsable", *what]).stdout.strip()

    def job_of(self, run: RunDir) -> str:
        """The Slurm job that the run was submitted as, or that supervises it now."""
        return ownership.jobs_of(run)[0]

    def give(self, folder: Path) -> None:
        """Give root's folder to the user of a strict site. Ranks may then write there, too."""
        if self.user:
            self.box.run(["chown", "-R", self.user, str(folder)])

    def project(self, **jobs: str) -> Path:
        """A project of one's own, with these modules in its ``jobs`` package."""
        folder = self.folder / "project"
        (folder / "jobs").mkdir(parents=True)
        for name, text in {"__init__": "", **jobs}.items():
            (folder / f"jobs/{name}.py").write_text(text)
        return folder


def reached(run: RunDir, step: int) -> RunStatus:
    def passed() -> RunStatus | None:
        status = run.status()
        return status if (status.progress.step or 0) >= step else None

    return wait_for(passed, START_S, f"step {step}")


def attempts_of(run: RunDir, count: int, timeout_s: float = END_S) -> list[AttemptRecord]:
    """The closed attempts, as soon as there are ``count``."""
    wait_for(lambda: len(run.attempts()) >= count, timeout_s, f"{count} attempts")
    return run.attempts()


def nothing_lost(run: RunDir) -> None:
    """Every attempt began at the step at which the one before it ended."""
    attempts = [a for a in run.attempts() if a.step_end is not None]
    for before, after in itertools.pairwise(attempts):
        assert after.step_start == before.step_end, (before, after)


def pid_of_supervisor(site: Site, run: RunDir) -> int:
    """As we see it: status.json has the pid of the node's own namespace."""
    inner, host = run.status().pid, run.status().host

    def is_it(pid: int) -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1] == str(inner)

    return wait_for(lambda: next((p for p, _ in site.box.processes(host) if is_it(p)), None), START_S, "it")
