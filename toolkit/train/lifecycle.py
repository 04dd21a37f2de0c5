"""What every training loop has in common: counting steps, saves, agreed stops, metrics and progress.

The :class:`~toolkit.train.loop.Trainer` uses it, and so do users' own loops (:mod:`toolkit.train.user_loop`). All ranks
make the same calls in the same order.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from toolkit import hang
from toolkit.base import logs
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.reader import Loaded
from toolkit.devices import accelerator
from toolkit.files.run_files import STOPPED_PHASE
from toolkit.metrics.goodput import Timesheet
from toolkit.metrics.meters import Throughput
from toolkit.metrics.sinks import Sink, build_sinks
from toolkit.nodes.agent import preimports
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.ranks.stop import STOP
from toolkit.run.records import stop_request
from toolkit.train import parts
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.saver import SAVE

log = logs.get(__name__)


class Loop(Protocol):
    """What the lifecycle asks of the loop that it serves."""

    def may_save(self, *, must: bool) -> bool:
        """Return False where the state is not worth saving. ``must``: nothing comes after this save."""

    def saved_with(self) -> dict[str, Json]:
        """Return what the loop wants to find in ``Loaded.meta`` at a resume. Called on every rank; rank 0's is kept."""

    def progress(self) -> dict[str, Any]:
        """Return what `toolkit status` is to show beside the step, the speed and the metrics."""


class Lifecycle:
    """Counts the steps of one attempt and does what is due between two of them."""

    def __init__(self, session: Session, checkpoints: Checkpoints, loop: Loop, *, log_every: int) -> None:
        """Take the parts; the speed is measured over ``log_every`` steps."""
        self._session = session
        self._checkpoints = checkpoints
        self._loop = loop
        self._activity = session.activity
        self.step = 0  #: steps done, of the whole run
        self.metrics: dict[str, float] = {}  #: the last figure of each metric
        self.sheet = Timesheet()
        self.throughput = Throughput(window=log_every)
        self.sink = Sink()
        self._on_request = parts.requests(session)
        self._saved = 0  #: the step of the last save, which may still be in progress, or have failed
        self._resumed: int | None = None

    # ------------------------------------------------------------------------------------------------ begin and end

    def resume(self) -> Loaded | None:
        """Fill the state from the newest good checkpoint and go on from its step. Return None if there is none."""
        self._session.start_up.end("data")
        loaded = self._checkpoints.resume()
        if loaded is not None:
            self.step = self._saved = self._resumed = loaded.step
            self.metrics = _figures(loaded.meta.get("metrics"))
        return loaded

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the metrics' files after :meth:`resume`; close them and the checkpoints at the end."""
        self._session.progress(step_start=self.step)
        sinks = build_sinks(self._session.run_dir, self._session.is_main, self._resumed)
        with closing(self._checkpoints), closing(sinks) as self.sink, closing(self._on_request):
            yield

    def begin(self) -> None:
        """Begin to measure where the time goes. The time before is start-up."""
        self._history = parts.attempt_history(self._session, self.step, self.sheet)
        self.sheet.begin()
        self._session.start_up.end("resume")
        self._session.progress(spent=self.sheet.spent, start_up=self._session.start_up.parts)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand over the run's result: from now on the run is completed."""
        self.report("done")
        self._activity.phase = hang.FINISHING
        self._checkpoints.saver.finish()
        self._session.finish(result)

    # --------------------------------------------------------------------------------------------- between two steps

    def boundary(self) -> None:
        """Stop, save or carry out a user's request where all ranks have agreed to.

        Call it before the first step and after each step.

        Raises StoppedError with everything committed.
        """
        self._activity.phase = hang.AT_BOUNDARY
        if self._on_request.is_recording:
            self._on_request.pass_step(self.step)
        # Several requests may meet at one step: ask until the gate has none.
        while (kind := self._session.gate.boundary(self.step)) is not None:
            if kind == STOP:
                self.stop()
            if kind == SAVE and self.step == self._saved:
                self._checkpoints.saver.set_timer()  # else this would be the last save by time
            elif kind == SAVE:
                self.save(must=False)
            if kind.startswith(stop_request.KIND):
                self._on_request.carry_out(kind, self.step)
            self._activity.phase = hang.AT_BOUNDARY

    def stop(self) -> NoReturn:
        """Commit, and raise StoppedError. All ranks call it at one step.

        Where this attempt has gained no step there is nothing to commit.
        """
        # A save in progress counts if it is of this step; one of an earlier step is given up for a new one.
        with self.sheet.on("checkpoint"):
            self._checkpoints.saver.await_save(self.step)
        is_kept = self.step == (self._checkpoints.saver.newest or 0)  # or at step 0, with nothing to save
        is_kept = is_kept or self.save(must=True)
        self.report(STOPPED_PHASE if is_kept else "train")
        total = self._loop.progress().get("total_steps")
        where = f"step {self.step}" + (f" of {total}" if total is not None else "")
        raise StoppedError(f"stopped at {where}; {'' if is_kept else 'not '}committed")

    def step_done(self, samples: int, data_wait_s: float) -> None:
        """Count a step over ``samples`` samples of all ranks that waited ``data_wait_s`` for this rank's."""
        self.step += 1
        # After an attempt's first step rank 0 notes the modules it has imported: the zygote imports them in advance.
        if self._activity.step is None:
            self._session.start_up.end("first_step")
            self._session.progress(start_up=self._session.start_up.parts)
            self._session.step_made()
            if self._session.is_main:
                preimports.note(self._session.run_dir / preimports.NAME)
        self._activity.step = self.step
        self.throughput.update(samples, data_wait_s)
        self.sheet.step_done(data_wait_s)
        self._session.progress(step=self.step)

    def save(self, *, must: bool) -> bool:
        """Save the state after the steps done. Return False where it is not worth saving.

        ``must``: nothing comes after this save. One in the background has only begun when this returns.
        """
        if not self._loop.may_save(must=must):
            self._checkpoints.saver.leave_out()
            return False
        self.report("checkpoint")
        self._activity.phase = hang.SAVING
        with self.sheet.on("checkpoint"):
            self.sink.flush()  # before the save: what was logged up to a committed step must survive with it
            self._checkpoints.saver.save(self.step, self._reached(), must=must)
        self._saved = self.step
        self.report("train")
        self.throughput.pause()
        return True

    def keep_best(self) -> None:
        """Keep the state that an evaluation after a resume has found to be the best."""
        if self._checkpoints.saver.newest == self.step:
            self._checkpoints.saver.describe(self.step, self._reached())
        else:  # it was loaded from memory
            self.save(must=False)

    def _reached(self) -> dict[str, Json]:
        return {"metrics": dict(self.metrics), **self._loop.saved_with()}

    def save_or_copy(self, is_due: bool, *, must: bool = False) -> None:
        """Save the state if that is due. Else copy it into the nodes' memory if that is due."""
        if is_due:
            self.save(must=must)
            return
        # A copy in memory is of no use at a step that is saved.
        copies, began_s = self._checkpoints.copies, time.monotonic()
        if copies is not None and copies.is_due(self.step) and self._loop.may_save(must=False):
            self._activity.phase = hang.SAVING
            with self.sheet.on("checkpoint"):
                self.sink.flush()  # a restart from there logs nothing before it again
                copies.keep(self.step, self._reached(), began_s)

    def figures(self, speed: Callable[[float], Mapping[str, float]] = lambda samples_per_s: {}) -> dict[str, float]:
        """Return the figures that every loop logs.

        They are its speed, memory, the attempt's number and where the time went. ``speed(samples_per_s)`` adds the
        job's own figures.
        """
        return {
            "train/samples_per_s": self.throughput.samples_per_s,
            "train/data_wait_fraction": self.throughput.data_wait_fraction,
            "train/memory_peak_gib": memory_peak_bytes(self._session.device) / (1 << 30),
            **speed(self.throughput.samples_per_s),
            **(self._history.scalars(self.step) or {}),
        }

    def show_tensors(self, figures: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Show the tensors among ``figures`` as histograms of this step, and return the numbers."""
        for tag, figure in figures.items():
            if isinstance(figure, Tensor):
                self.sink.histogram(self.step, tag, figure)
        return {tag: figure for tag, figure in figures.items() if not isinstance(figure, Tensor)}

    def write(self, values: Mapping[str, float]) -> None:
        """Log ``values`` by tag at this step, and tell `toolkit status`."""
        self.sink.scalars(self.step, values)
        if (table := self._history.take_table()) is not None:
            self.sink.text("run/restarts", table, self.step, markdown=True)
        self.report("train")

    def report(self, phase: str) -> None:
        """Report the loop's progress to the supervisor, or to the run's files."""
        progress: dict[str, Any] = {
            "phase": phase,
            "step": self.step,
            "loss": self.metrics.get("train/loss"),
            "samples_per_s": self.throughput.samples_per_s,
            "data_wait_fraction": self.throughput.data_wait_fraction,
            "save_s": round(self._checkpoints.saver.save_s, 3),
            "save_error": self._checkpoints.saver.failure,
            "metrics": dict(self.metrics),
            **self._loop.progress(),
        }
        # A user's loop may not know its end, and then there is no time left to report.
        total = progress.get("total_steps")
        if total is not None:
            progress["eta_s"] = self.throughput.eta_s(total - self.step)
        self._session.progress(**progress)


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used: torch's on its GPU, else the host's."""
    on_device = None if device.type == "cpu" else accelerator.memory_peak_bytes(device)
    if on_device is not None:
        return on_device
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _figures(value: Any) -> dict[str, float]:
    return {str(name): float(figure) for name, figure in (value or {}).items()}
