"""The engine of every training loop: counting steps, saves, agreed stops, metrics and progress.

The :class:`~toolkit.train.loop.Trainer` runs on it, and so do users' own loops (:mod:`toolkit.train.user_loop`). All
ranks make the same calls in the same order.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from toolkit import hang, registry
from toolkit.base import logs
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.reader import Loaded
from toolkit.config import JobConfig, TrainConfig, all_keys, dump_config, leaves, value_of
from toolkit.devices import accelerator
from toolkit.files.run_files import STOPPED_PHASE, SweepPoint
from toolkit.metrics.goodput import Timesheet
from toolkit.metrics.meters import Throughput
from toolkit.metrics.sinks import Sink, build_sinks
from toolkit.nodes.agent import preimports
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.ranks.stop import STOP
from toolkit.run.records import stop_request
from toolkit.train import parts
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.loss_windows import LOSS, LossWindow
from toolkit.train.not_finite import NotFinite
from toolkit.train.saver import SAVE

log = logs.get(__name__)

#: Tag for the number of logging steps whose mean loss was not finite; logged only when there were some.
NOT_FINITE = "train/not_finite"
_IMAGES = 16
#: Keys by which runs are not compared. TensorBoard shows only the first columns without scrolling.
_LEFT_OUT = (
    *("data.augment", "data.bad_samples", "data.max_bad_samples", "data.share", "data.split", "data.workers"),
    *("strategy.activation_checkpointing", "strategy.compression", "strategy.pipeline.split", "strategy.tensor_plan"),
    *("train.channels_last", "train.compile", "train.cudnn_benchmark", "train.expandable_segments"),
    *("train.log_every", "train.on_nan", "train.pruning.end_step", "train.pruning.every_steps"),
    *("train.pruning.start_step", "train.pruning.structured", "train.rollback_after", "train.skip_bad_steps"),
)
_SECTIONS = ("strategy.", "data.", "model.", "optim.", "train.")


class LoopEngine:
    """Makes the steps of one attempt, and does what is due between two of them. A loop derives from it."""

    # What a loop sets before :meth:`_resume`.
    _checkpoints: Checkpoints
    _window: LossWindow
    _not_finite: NotFinite

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self._session, self._activity = session, session.activity
        self._train_config = config
        self.step = 0  #: steps done, of the whole run; within a step its number, from 0
        self._total: int | None = None  #: the step at which the run ends, where that is known
        self._metrics: dict[str, float] = {}  #: the last figure of each metric
        self._sheet = Timesheet()
        self._sink = Sink()
        self._on_request = parts.requests(session)
        self._trace = parts.trace(session)
        self._stack = ExitStack()  #: closed at the loop's end
        self._saved = 0  #: the step of the last save, which may still be in progress, or have failed
        self._in_step = False
        self._samples, self._wait_s = 0, 0.0  #: of the step in progress: samples of all ranks, wait for the batch
        self._log_due = self._save_due = False
        self._figured = -1  #: the step that has its :meth:`_figures` already
        self._stopped: StoppedError | None = None

    # ------------------------------------------------------------------------------------------ what a loop provides

    def _after_step(self) -> bool:
        """Do what else is due after a step. Return False where no save or stop may come now."""
        raise NotImplementedError

    def _write(self) -> None:
        """Log the means since the last logging step."""
        raise NotImplementedError

    def _may_save(self, *, must: bool) -> bool:
        """Return False where the state is not worth saving. ``must``: nothing comes after this save."""
        raise NotImplementedError

    def _saved_with(self) -> dict[str, Json]:
        """Return what the loop wants to find in ``Loaded.meta`` at a resume. Called on every rank; rank 0's is kept."""
        return {"log": self._window.state(), **self._not_finite.state()}

    def _restore(self, meta: Mapping[str, Any]) -> None:
        """Take over what :meth:`_saved_with` has left in a checkpoint."""
        self._figured = self.step  # nothing was measured yet
        if "log" in meta:  # a library's loop keeps no means, and older checkpoints have others
            self._window.restore(meta["log"])
            self._not_finite.restore(meta)

    def _progress(self) -> dict[str, Any]:
        """Return what `toolkit status` is to show besides the step, the speed and the metrics."""
        return {}

    # ------------------------------------------------------------------------------------------------ begin and end

    def _resume(self, describe: Callable[[Sink], None]) -> Loaded | None:
        """Fill the state from the newest good checkpoint, and begin the attempt there.

        A fresh start is described in the metrics' files instead, and None is returned.
        """
        session = self._session
        session.start_up.end("data")
        loaded = self._checkpoints.resume()
        if loaded is not None:
            self.step = self._saved = loaded.step
            metrics: Any = loaded.meta["metrics"]
            self._metrics = dict(metrics)
            self._restore(loaded.meta)
        session.progress(step_start=self.step)
        # The metrics' files are opened after the resume: they drop what was logged after its step.
        self._sink = build_sinks(session.run_dir, session.is_main, None if loaded is None else loaded.step)
        for opened in (self._checkpoints, self._sink, self._on_request):
            self._stack.callback(opened.close)
        if loaded is None:
            describe(self._sink)
        self._begin()
        return loaded

    def _begin(self) -> None:
        """Begin to measure where the time goes. The time before is start-up."""
        self._throughput = Throughput(window=self._train_config.log_every)
        self._history = parts.attempt_history(self._session, self.step, self._sheet)
        self._sheet.begin()
        self._session.start_up.end("resume")
        self._session.progress(spent=self._sheet.spent, start_up=self._session.start_up.parts)

    def _complete(self, result: Mapping[str, Any]) -> None:
        """Hand over the run's result: from now on the run is completed."""
        self._report("done")
        self._activity.phase = hang.FINISHING
        self._checkpoints.saver.finish()
        self._session.finish(result)

    def close(self) -> None:
        """Close the loaders and files. Nothing is saved: it may be called after an error."""
        self._stack.close()

    # ---------------------------------------------------------------------------------------------------- the steps

    def _steps_of(self, batches: Iterator[Any], is_done: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches, each for one step, until ``is_done``. After each step do what is due."""
        while not is_done():
            self._activity.phase = hang.WAITING_FOR_DATA
            began = time.perf_counter()
            batch = next(batches, self)  # ``self`` stands for the end: a batch may be anything, None too
            if batch is self:
                return
            self._wait_s = time.perf_counter() - began
            self._activity.phase = hang.IN_STEP
            self._in_step = True
            # The body of the loop runs here: it is the step.
            yield batch
            del batch  # else it would stay on the device during evaluations and saves
            self._end_step()

    def _end_step(self) -> None:
        """Count the step in progress, if there is one, and do what is due after it."""
        self._log_step()
        if self._after_step():
            self._save_or_copy()
            self._boundary()

    def _log_step(self) -> None:
        """Count the step in progress, if there is one, and log if that is due."""
        if self._in_step:
            self._count_step()
            # Log before saving: a rollback happens there, and a loss that is not finite is found.
            if self._log_due or self.step == self._total:
                self._log_due = False
                self._write()

    def _count_step(self) -> None:
        """Count the step in progress, if there is one."""
        if not self._in_step:
            return
        self._in_step = False
        self.step += 1
        if self._activity.step is None:
            self._session.start_up.end("first_step")
            self._session.progress(start_up=self._session.start_up.parts)
            self._session.step_made()
            if self._session.is_main:  # the zygote of the next attempt imports these modules in advance
                preimports.note(self._session.run_dir / preimports.NAME)
        self._activity.step = self.step
        self._throughput.update(self._samples, self._wait_s)
        self._sheet.step_done(self._wait_s)
        self._session.progress(step=self.step)
        self._log_due |= self.step % self._train_config.log_every == 0
        self._save_due |= self._checkpoints.saver.is_due(self.step)

    # --------------------------------------------------------------------------------------------- between two steps

    def _boundary(self) -> None:
        """Stop, save or carry out a user's request where all ranks have agreed to. Called between two steps.

        Raises StoppedError with everything committed.
        """
        self._activity.phase = hang.AT_BOUNDARY
        if self._on_request.is_recording:
            self._on_request.pass_step(self.step)
        # Several requests may meet at one step: ask until the gate has none.
        while (kind := self._session.gate.boundary(self.step)) is not None:
            if kind == STOP:
                self._stop()
            if kind == SAVE and self.step == self._saved:
                self._checkpoints.saver.set_timer()  # else this would be the last save by time
            elif kind == SAVE:
                self._save(must=False)
            if kind.startswith(stop_request.KIND):
                self._on_request.carry_out(kind, self.step)
            self._activity.phase = hang.AT_BOUNDARY
        self._activity.phase = hang.OWN_CODE

    def _stop(self) -> NoReturn:
        """Commit, and raise StoppedError. All ranks call it at one step."""
        # A save in progress counts if it is of this step; one of an earlier step is given up for a new one.
        with self._sheet.on("checkpoint"):
            self._checkpoints.saver.await_save(self.step)
        is_kept = self.step == (self._checkpoints.saver.newest or 0)  # or at step 0, with nothing to save
        is_kept = is_kept or self._save(must=True)
        self._report(STOPPED_PHASE if is_kept else "train")
        where = f"step {self.step}" + (f" of {self._total}" if self._total is not None else "")
        self._stopped = StoppedError(f"stopped at {where}; {'' if is_kept else 'not '}committed")
        raise self._stopped

    def _save(self, *, must: bool) -> bool:
        """Save the state after the steps done. Return False where it is not worth saving.

        ``must``: nothing comes after this save. Other saves may only have begun, in the background, when this returns.
        """
        if not self._may_save(must=must):
            self._checkpoints.saver.leave_out()
            return False
        self._report("checkpoint")
        self._activity.phase = hang.SAVING
        with self._sheet.on("checkpoint"):
            self._sink.flush()  # before the save: what was logged up to a committed step must survive with it
            self._checkpoints.saver.save(self.step, self._reached(), must=must)
        self._saved = self.step
        self._report("train")
        self._throughput.pause()
        return True

    def _reached(self) -> dict[str, Json]:
        return {"metrics": dict(self._metrics), **self._saved_with()}

    def _save_or_copy(self) -> None:
        """Save the state if that is due. Else copy it into the nodes' memory if that is due."""
        if self._save_due:
            self._save_due = False
            self._save(must=self.step == self._total)
            return
        # A copy in memory is of no use at a step that is saved.
        copies, began_s = self._checkpoints.copies, time.monotonic()
        if copies is not None and copies.is_due(self.step) and self._may_save(must=False):
            self._activity.phase = hang.SAVING
            with self._sheet.on("checkpoint"):
                self._sink.flush()  # a restart from there logs nothing before it again
                copies.keep(self.step, self._reached(), began_s)

    def _figures(self) -> dict[str, float]:
        """Return the figures of every loop, once for each step: its speed, memory, attempts and where the time went."""
        if self._figured == self.step:
            return {}
        self._figured = self.step
        return {
            "train/samples_per_s": self._throughput.samples_per_s,
            "train/data_wait_fraction": self._throughput.data_wait_fraction,
            "train/memory_peak_gib": memory_peak_bytes(self._session.device) / (1 << 30),
            **(self._history.scalars(self.step) or {}),
        }

    def _judged(self, means: Mapping[str, float]) -> dict[str, float]:
        """Judge the mean loss. Return the means, with the number of mean losses that were not finite, if any."""
        if LOSS in means:
            self._not_finite.judge(self.step, means[LOSS], self._window.taken)
        if not self._not_finite.count:
            return dict(means)
        self._metrics[NOT_FINITE] = self._not_finite.count
        return {**means, NOT_FINITE: self._not_finite.count}

    def _write_figures(self, values: Mapping[str, float]) -> None:
        """Log ``values`` by tag at this step, and report it to `toolkit status`."""
        self._sink.scalars(self.step, values)
        if (table := self._history.take_table()) is not None:
            self._sink.text("run/restarts", table, self.step, markdown=True)
        self._report("train")

    def _report(self, phase: str) -> None:
        """Report the loop's progress to the supervisor, or to the run's files."""
        progress: dict[str, Any] = {
            "phase": phase,
            "step": self.step,
            "loss": self._metrics.get("train/loss"),
            "samples_per_s": self._throughput.samples_per_s,
            "data_wait_fraction": self._throughput.data_wait_fraction,
            "save_s": round(self._checkpoints.saver.save_s, 3),
            "save_error": self._checkpoints.saver.failure,
            "metrics": dict(self._metrics),
            **self._progress(),
        }
        if self._total is not None:  # a user's loop may not know its end
            progress["total_steps"] = self._total
            progress["eta_s"] = self._throughput.eta_s(self._total - self.step)
        self._session.progress(**progress)


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used: torch's on its GPU, else the host's."""
    on_device = None if device.type == "cpu" else accelerator.memory_peak_bytes(device)
    if on_device is not None:
        return on_device
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def describe_run(config: JobConfig, sample: Batch | None, sink: Sink) -> None:
    """Log the config as text and hyper-parameters, and the first images of ``sample``."""
    sink.text("config", dump_config(config))
    # Keys of the strategies that this run does not use say nothing about it.
    others = tuple(f"strategy.{name}." for name in registry.names("strategies") if name != config.strategy.name)
    shown = [key for key in all_keys() if key.startswith(_SECTIONS) and not key.startswith(others)]
    values = _shown((key, value_of(config, key)) for key in shown if key not in _LEFT_OUT)
    sink.hparams(_own(config) | values, metrics=("eval/accuracy", "eval/loss"))
    for leaf in () if sample is None else nested.leaves(sample.data):
        if isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[1] in (1, 3):
            sink.images("samples", leaf[:_IMAGES])
            return


def describe_script(config: JobConfig, run_dir: Path, sink: Sink) -> None:
    """Log the config as text, and the hyper-parameters of a script with its own loop, if it has any."""
    sink.text("config", dump_config(config))
    if values := hparams_of_script(config, run_dir):
        sink.hparams(values)


def hparams_of_script(config: JobConfig, run_dir: Path) -> dict[str, bool | int | float | str]:
    """Return the script's keys and options, and the keys that the run's sweep varies, as hyper-parameters."""
    point = SweepPoint.read_or_none(run_dir / "point.json")  # a damaged one must not end the training
    return _own(config) | ({} if point is None else _shown(point.values.items()))


def _own(config: JobConfig) -> dict[str, bool | int | float | str]:
    return _shown([*leaves(config.params), *leaves(config.args, "args")])


def _shown(values: Iterable[tuple[str, Any]]) -> dict[str, bool | int | float | str]:
    """Return lists and mappings as text. Leave out null and what is empty: TensorBoard has no way to show them."""
    shown: dict[str, bool | int | float | str] = {}
    for key, value in values:
        if isinstance(value, (bool, int, float, str)):
            shown[key] = value
        elif isinstance(value, (list, dict)) and value:
            shown[key] = str(value)
    return shown
