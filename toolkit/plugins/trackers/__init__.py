"""Copies of runs' metrics in trackers of experiments. A login node makes them from their files, by `toolkit upload`.

For ``trackers:`` the supervisor starts one ``toolkit upload RUN TRACKER --follow`` each on the batch host, and no rank
waits for them. They may be killed at any time, as `sync` may. One that has failed is started again; their output is in
``logs/tracker-NAME.log``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from toolkit import registry
from toolkit.base import logs
from toolkit.base.errors import (
    EXIT_DONE,
    EXIT_REQUEST,
    ConfigError,
    DamagedFileError,
    RequestError,
    ToolkitError,
    TrackerError,
    did_you_mean,
)
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics.lines import MetricsLine
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.user_script import restore_import_path


def build_tracker(name: str, run: RunIdentity) -> Tracker:
    """Return the tracker for one run. Raises RequestError if its library is not installed."""
    try:
        tracker: Tracker = registry.find("trackers", name)(run)
    except ImportError as error:
        raise RequestError(f"{name} cannot be imported ({error}): pip install {name}") from None
    return tracker


#: Values by step and tag.
Points: TypeAlias = Mapping[tuple[int, str], float]


@dataclass(frozen=True)
class RunIdentity:
    """The run whose metrics are sent."""

    id: str
    name: str  #: of its config
    project: str
    begun: float  #: seconds since the epoch
    config: Mapping[str, str]  #: by dotted key, without secrets


class Tracker(Protocol):
    """A tracker with one run in it, which is called a copy. Every method may raise TrackerError."""

    place: str  #: server or file, and the project; without passwords
    lines_at_once: int  #: for one call of :meth:`send`

    def open(self, remote: str | None) -> tuple[str, bool]:
        """Find the copy, or make one. Return its id there, and whether it was found.

        ``remote`` is the id that an earlier call has returned. None if that is not known: then the copy is looked for.
        """

    def tag(self, tag: str) -> str:
        """Return the name of a metric there."""

    def received(self, since: int) -> Points | int:
        """Return the copy's values from step ``since`` on, by step and its own tags.

        A tracker that takes whole lines in the order of their steps returns the last step that it has; -1 if none.
        """

    def send(self, lines: Sequence[MetricsLine]) -> None:
        """Add values. They are there for good when this returns; if it raises, some may be."""

    def clear(self) -> str:
        """Remove the copy, and make an empty one. Return its id."""

    def close(self, state: RunState | None) -> None:
        """End the work. ``state`` is how the run ended; None if it is unfinished."""


@contextlib.contextmanager
def translate_errors(place: str) -> Iterator[None]:
    """Turn whatever a tracker's library raises into a TrackerError that says where and why."""
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:  # each library raises others, and those of the libraries below it
        text = without_password(" ".join(str(error).split()))
        why = f"{type(error).__name__}: {text[:300]}"
        raise TrackerError(
            f"{place} did not accept the metrics ({why}); the same command continues where it stopped"
        ) from error


def without_password(text: str) -> str:
    """Return ``text`` with user and password left out of the addresses in it."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)


log = logs.get(__name__)


def refuse_missing(config: JobConfig) -> None:
    """Refuse a tracker that is unknown, not installed, or told not to send. Raises ConfigError."""
    known = registry.names("trackers")
    for name in [entry.partition(":")[0] for entry in config.trackers]:
        if name not in known:
            raise ConfigError(f"trackers: unknown value {name!r}; {did_you_mean(name, known)}valid: {', '.join(known)}")
        if known[name].startswith("toolkit.") and find_spec(name) is None:
            raise ConfigError(f"trackers: {name} is not installed here: pip install {name}")
        if name == "wandb" and (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
            raise ConfigError(
                f"trackers: wandb sends the curves to its server, and WANDB_MODE={mode} is set: unset it, or take "
                "wandb out and send them later from a node that reaches the server, by `toolkit upload RUN wandb`"
            )


class Senders:
    """The programs that send the curves of one run."""

    def __init__(self, run: RunDir, config: JobConfig) -> None:
        self._run = run
        environ = restore_import_path(dict(os.environ), run.code)
        self._programs = [_Program(run, entry, environ) for entry in config.trackers]

    def close(self) -> None:
        """Wait until all points of a run that has ended are sent, but not for long. End the programs of any other."""
        deadline = time.monotonic() + (limits().last_points_s if self._run.result() is not None else 0.0)
        for program in self._programs:
            program.close(deadline)


class _Program:
    def __init__(self, run: RunDir, entry: str, environ: Mapping[str, str]) -> None:
        self._run, self._environ = run, environ
        self._name, _, project = entry.partition(":")
        self._words = [str(run.path), self._name, *(["--project", project] if project else [])]
        self._log_path = run.logs / f"tracker-{self._name}.log"
        self._is_closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_sending, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def _keep_sending(self) -> None:
        is_first = True
        while (code := self._send()) not in (EXIT_DONE, None) and not self._is_closing.is_set():
            is_refused = code == EXIT_REQUEST
            if is_refused or is_first:
                again = "" if is_refused else "; it is started again"
                log.warning("trackers: %s ended with %d%s; its output: %s", self._name, code, again, self._log_path)
            is_first = False
            is_over = False
            with contextlib.suppress(OSError, DamagedFileError):  # its disk may be away
                is_over = self._run.result() is not None
            pause_s = limits().last_upload_pause_s if is_over else limits().upload_pause_s
            if is_refused or self._is_closing.wait(pause_s):
                return

    def _send(self) -> int | None:
        """Run the program to its end, and return its exit code; None where it must no longer start."""
        command = [sys.executable, "-m", "toolkit", "upload", *self._words, "--follow"]
        with self._lock:
            if self._is_closing.is_set():
                return None
            with open_log(self._log_path) as output:
                # Slurm's signals for the whole job are not for it: the last points come after them.
                self._process = start_child(
                    command,
                    self._environ,
                    end_by=signal.SIGKILL,
                    ignore_signals=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        return self._process.wait()

    def close(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():  # all is sent, or the log says why not
            return
        self._is_closing.set()
        if self._run.result() is not None:
            advice = shlex.join(["toolkit", "upload", self._run.id, *self._words[1:]])
            log.warning(
                "trackers: %s has not received everything within %g s: `%s` sends the rest",
                self._name,
                limits().last_points_s,
                advice,
            )
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        self._thread.join()
