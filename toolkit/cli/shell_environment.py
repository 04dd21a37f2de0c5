"""What a run's processes find: variables, folder and sources, as lines of bash; and the nodes that it asks for."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit import config as configs
from toolkit.base.errors import RequestError, RunNotFoundError
from toolkit.cli.run_rows import given_words
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.run.prepare import snapshot
from toolkit.run.submission.executors import sbatch_script

#: Options of sbatch that salloc does not have, or that are about a batch script.
_OF_BATCH = (
    *("output", "error", "input", "open-mode", "signal", "requeue", "no-requeue", "dependency", "array", "parsable"),
    *("export", "export-file", "get-user-env", "wrap", "wait"),
)
#: Reads the lines in its first argument after the user's own, and stays.
_INTERACTIVE = 'exec bash --rcfile <(printf %s "$1") -i'


@dataclass(frozen=True)
class ShellEnvironment:
    """What a run, or a run of a config, has around it."""

    config: JobConfig
    run: RunDir | None

    @property
    def _is_script(self) -> bool:
        return self.config.job == configs.SCRIPT_JOB

    def _lines(self) -> list[str]:
        cluster, folder = self.config.cluster, Path.cwd()
        values = {"TOOLKIT_RUNS": str(rundir.runs_root()), "OMP_NUM_THREADS": str(cluster.cpus_per_task)}
        if self.run is not None:
            values["TOOLKIT_RUNS"] = str(self.run.path.parent.parent)
            folder = snapshot.submit_folder(self.run.path) or folder
            if not self._is_script:
                # Nothing is written into the copy.
                values |= {**snapshot.environment(self.run.code, {}), "PYTHONDONTWRITEBYTECODE": "1"}
        quoted = {name: shlex.quote(value) for name, value in values.items()}
        if "PYTHONPATH" in quoted:
            quoted["PYTHONPATH"] += '"${PYTHONPATH:+:$PYTHONPATH}"'
        # The Python that runs this program is the one that a job of it uses. A script uses the one on the PATH.
        python = [] if self._is_script else [f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"']
        exports = [f"export {name}={value}" for name, value in quoted.items()]
        return [*cluster.setup, *python, *exports, f"cd {shlex.quote(str(folder))}"]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line of a shell with this environment, or of the command ``words`` in them."""
        lines = self._lines()
        if words:
            return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "toolkit-shell", *words]
        name = self.config.name if self.run is None else f"{self.config.name} {self.run.id[-8:]}"
        lines = ["[ -f ~/.bashrc ] && . ~/.bashrc", *lines, f'PS1={shlex.quote(f"({name}) ")}"$PS1"']
        return ["bash", "-c", _INTERACTIVE, "toolkit-shell", "\n".join(lines)]

    def options(self) -> list[str]:
        """Return the request for nodes as options of salloc: those of the run's batch script, without spare nodes."""
        cluster = replace(self.config.cluster, spare_nodes=0)
        run = self.run or RunDir(rundir.runs_root() / self.config.name / "RUN_ID")
        options: list[str] = []
        for line in sbatch_script(replace(self.config, cluster=cluster), run).splitlines():
            if line == "#SBATCH hetjob":
                options.append(":")
            elif line.startswith("#SBATCH --"):
                (option,) = shlex.split(line.removeprefix("#SBATCH "))
                if option.removeprefix("--").partition("=")[0] not in _OF_BATCH:
                    options.append(option)
        return options

    def sentence(self) -> str:
        """Return what a user should know of the shell."""
        told = f"environment of {self.config.name}"
        if self.run is not None:
            told = f"environment of run {self.run.id}, which is not touched"
            told += "" if self._is_script else f"; Python imports from {self.run.code}"
            if words := given_words(self.run):
                told += f"; {words}"
        if self.config.cluster.container is not None:
            told += "; outside of its container"
        return told


def environment_of(text: str, overrides: Sequence[str]) -> ShellEnvironment:
    """Return the environment of the run, or of the config file or script, that ``text`` names."""
    run = None
    if not Path(text).is_file():
        try:
            run = rundir.find(text)
        except RunNotFoundError as error:
            if text.endswith((".yaml", ".yml", ".py")):
                raise RequestError(f"there is no {text} here ({Path.cwd()})") from None
            raise error
    source = text if run is None else run.config
    config = configs.load_config(source, overrides, site=run is None)
    if run is None:  # the job of a run is in its own copy of the sources
        configs.validate(config)
    return ShellEnvironment(config, run)
