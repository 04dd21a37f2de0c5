"""The steps of a user's loop. They are counted; in between the run is saved, logged or stopped where that is due."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

import torch

from toolkit import hang
from toolkit.base import logs
from toolkit.base.errors import ConfigError, NotFiniteError, StoppedError
from toolkit.checkpoint.reader import Loaded
from toolkit.config import JobConfig, dump_config
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.train import parts
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.ddp_buckets import DdpBuckets
from toolkit.train.describe import config_hparams, swept_hparams
from toolkit.train.handed_over import Accumulation
from toolkit.train.lifecycle import Lifecycle
from toolkit.train.loss_windows import LogWindow
from toolkit.train.not_finite import on_ranks, weights_are_finite
from toolkit.train.same_calls import SameCalls
from toolkit.train.user_state import UserState

log = logs.get(__name__)

_NAN = "look at the data and the learning rate, then resume; train.on_nan: warn trains on"


@dataclass
class LoopPosition:
    """A position in the data of a loop: an epoch, a ``run.steps`` in it, and the batches of that one."""

    epoch: int = 0
    place: int = 0  #: the number of the ``run.steps`` in the epoch; of loops with a ``total`` the number of the loader
    batch: int = 0
    earlier: int = 0  #: batches of the epoch's earlier places

    @property
    def is_begun(self) -> bool:
        """True if a step of the epoch has been made."""
        return bool(self.batch or self.earlier)


class UserSteps:
    """One rank's steps of a user's own loop, or of a library's. Every rank makes the same calls."""

    def __init__(self, config: JobConfig, session: Session) -> None:
        self.config = config  #: the whole config, resolved
        self._session = session
        self._activity = session.activity
        self._window = LogWindow(session.rank, session.device)
        self._state: UserState | None = None
        self._life: Lifecycle | None = None
        self._stack = ExitStack()
        self._buckets = DdpBuckets()
        self._stack.callback(self._buckets.close)
        self._calls = SameCalls(session, lambda: 2 * self.step + self._in_step)
        self._stack.callback(self._calls.close)
        self._not_finite = 0  #: mean losses in a row that were not finite
        self._last_finite = 0  #: the step of the last one that was
        self._at = LoopPosition()
        self._epochs: int | None = None  #: the epoch at which the phase in progress ends; None outside of one
        self._phases = 0  #: calls of TrainingRun.epochs in this attempt
        self._phase, self._first_epoch = -1, 0  #: the last one that has begun in this run, and its first epoch
        self._total: int | None = None
        self._in_step = False
        self._accumulation = Accumulation(())
        self._has_warned_of_idle = False
        self._is_checked = False  #: that all can be saved; see :meth:`_check_once`
        self._figured = -1  #: the step that has the figures of every loop already
        self._samples, self._wait_s = 0, 0.0  #: of the step in progress: samples of all ranks, wait for the batch
        self._save_due = self._save_asked = False  #: by the config, by the loop
        self._log_due = False
        self._has_logged = False  #: outside of a step, since the last write
        self._stopped: StoppedError | None = None
        self._has_left = False  #: the loop was begun and has not come to its end
        self._trace = parts.trace(session)

    @property
    def step(self) -> int:
        """Return the steps done in the whole run. Within a step this is its number, from 0."""
        return 0 if self._life is None else self._life.step

    def _resume(self, checkpoints: Checkpoints) -> Loaded | None:
        """Fill the state from the newest good checkpoint, and begin the attempt there."""
        self._checkpoints = checkpoints
        self._life = Lifecycle(self._session, checkpoints, self, log_every=self.config.train.log_every)
        loaded = self._life.resume()
        # The metrics' files are opened after the resume: they drop what was logged after its step.
        if loaded is not None:
            self._figured = self._last_finite = loaded.step
            self._take_position(loaded.meta)
            self._buckets.take(loaded.meta)
            self._not_finite = loaded.meta.get("not_finite", 0)  # type: ignore[assignment]  # a library keeps none
        self._stack.enter_context(self._life.open())
        if self.config.checkpoint.keep_best is not None:
            log.warning("checkpoint.keep_best is for jobs with an evaluate(): of this loop the newest checkpoints stay")
        if loaded is None:
            self._life.sink.text("config", dump_config(self.config))
            if values := self._hparams():
                self._life.sink.hparams(values)
        self._life.begin()
        return loaded

    def _hparams(self) -> dict[str, bool | int | float | str]:
        return config_hparams(self.config) | swept_hparams(self._session.run_dir)

    def _complete(self, life: Lifecycle) -> None:
        """Mark the run as completed in TensorBoard, where it has hyper-parameters to show."""
        if self._hparams():
            life.sink.completed(life.step)

    def _end_step(self, *, may_save: bool = True) -> None:
        """Count the step in progress, if any, and do what is due after it.

        Without ``may_save`` the save and the boundary are put off.
        """
        life = self._opened("run.steps")
        if self._in_step:
            self._finish_step()
            if self._log_due or life.step == self._total:
                self._log_due = False
                self._write()
        if self._accumulation.is_open or not may_save:
            return
        self._check_once()
        if self._save_asked and not self._save_due:
            self._calls.meet("called run.save()")
        is_due = self._save_due or self._save_asked
        if is_due and (waited := self._accumulation.waited) and not self._has_warned_of_idle:
            self._has_warned_of_idle = True
            log.warning(
                "step %d is saved, and no optimizer of run.resumable has made a step since step %d: if the loop has "
                "replaced it, a resume has the old one. Keep one optimizer: give it groups by add_param_group, and set "
                "their rates",
                self.step,
                self.step - waited,
            )
        self._save_due = self._save_asked = False
        life.save_or_copy(is_due)
        self._boundary()

    def _finish_step(self) -> None:
        """Count the step in progress, if there is one. A step that was left by a ``break`` counts too.

        What is due after that one is done after the next step: a resume repeats what comes between two epochs.
        """
        if self._in_step and self._life is not None:
            self._in_step = False
            self._at.batch += 1
            self._accumulation.end_step()
            if self._trace is not None and self._state is not None:
                logged = self._window.latest
                loss = torch.as_tensor(logged.get("train/loss", 0.0)) / self._session.world_size
                self._trace.take_end(loss, self._state.live(), logged, self._state.parts())
            self._life.step_done(self._samples, self._wait_s)
            self._log_due |= self.step % self.config.train.log_every == 0
            self._save_due |= self._checkpoints.saver.is_due(self.step)

    def _check_once(self) -> None:
        """Check after an attempt's first step what a save needs. The first save may be due after half an hour."""
        if not self._is_checked and self._state is not None:
            self._is_checked = True
            self._state.check()

    def _meet(self, what: str, advice: str = "") -> None:
        """Wait for all ranks to have done ``what``. Write what any of them has logged outside of a step."""
        if self._calls.meet(what, has=self._has_logged, advice=advice):
            self._has_logged = False
            self._write()

    def _boundary(self) -> None:
        assert self._life is not None
        try:
            self._life.boundary()
        except StoppedError as stopped:
            self._stopped = stopped  # TrainingRun.finish raises it again where the user's code has caught it
            raise
        self._activity.phase = hang.OWN_CODE

    def _write(self) -> None:
        life = self._opened("run.log")
        # The loop may be in a step or between two: the phase before comes back at the end.
        phase, self._activity.phase = self._activity.phase, hang.LOGGING
        means = self._window.take()
        life.metrics |= means
        life.write(means | self._figures(life))
        # The second mean loss in a row that is not finite ends the run, with ``train.on_nan: stop``.
        loss = means.get("train/loss", 0.0)
        self._not_finite = 0 if math.isfinite(loss) else self._not_finite + 1
        if not self._not_finite:
            self._last_finite = self.step
        else:
            where = on_ranks(math.isfinite(self._window.taken.get("train/loss", 0.0)), self._session.device)
            what = f"the loss is not finite{where}, since a step after step {self._last_finite}"
            log.warning("step %d: %s", self.step, what)
            if self._not_finite > 1 and self.config.train.on_nan == "stop":
                raise NotFiniteError(f"train.on_nan: {what}; {_NAN}")
        self._activity.phase = phase

    def _figures(self, life: Lifecycle) -> dict[str, float]:
        """Return the figures of every loop, once for each step. After a resume nothing was measured yet."""
        if self._figured == life.step:
            return {}
        self._figured = life.step
        return life.figures()

    def _save_the_end(self) -> None:
        """Save after the last step, unless that is done. Nothing comes after this save, so it must be made."""
        life = self._opened("run.steps")
        self._checkpoints.saver.await_save(life.step)
        if self._checkpoints.saver.newest != life.step and not life.save(must=True):
            raise NotFiniteError(
                f"train.on_nan: after step {life.step}, the last one, the weights are not finite; {_NAN}"
            )

    def close(self) -> None:
        """Close the loaders and files. Nothing is saved here, so nothing is saved after an error."""
        self._stack.close()

    # ------------------------------------------------------------------------------------------------ for the lifecycle

    def may_save(self, *, must: bool) -> bool:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        assert self._state is not None
        if self.config.train.on_nan == "warn" or weights_are_finite(self._state):
            return True
        log.warning("step %d is not saved: the weights are not finite", self.step)
        return False

    def saved_with(self) -> dict[str, Json]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        here = torch.tensor([*astuple(self._at), self._window.new()], device=self._session.device)
        rows = gather_rows(here).tolist()
        # The epochs of `run.steps(loader, total=n)` may end at other steps on other ranks.
        positions: list[Json] = [row[:4] for row in rows]
        by_rank: dict[str, Json] = {"positions": positions} if positions.count(positions[0]) < len(positions) else {}
        tags = self._window.agreed_tags(sum(row[4] for row in rows))
        return {**self._position(), **by_rank, "logged": tags, "not_finite": self._not_finite}

    def _position(self) -> dict[str, Json]:
        phase: dict[str, Json] = {"phase": self._phase, "first_epoch": self._first_epoch}
        return {"position": list(astuple(self._at)), "ddp_orders": self._buckets.orders(), **phase}

    def _take_position(self, meta: Mapping[str, Any]) -> None:
        """Go on at the position of a checkpoint's ``meta``."""
        self._at = LoopPosition(*meta["position"])
        self._phase, self._first_epoch = meta["phase"], meta["first_epoch"]
        if (positions := meta.get("positions")) is None:
            return
        if len(positions) == self._session.world_size:
            self._at = LoopPosition(*positions[self._session.rank])
        elif self._session.is_main:
            log.warning(
                "the ranks of this checkpoint were at different places of their loaders, %s by epoch, place and batch; "
                "on another number of ranks all go on from the first one's",
                positions,
            )

    def progress(self) -> dict[str, Any]:
        """See :class:`~toolkit.train.lifecycle.Loop`."""
        epochs = {} if self._epochs is None else {"epoch": self._at.epoch, "epochs": self._epochs}
        return epochs if self._total is None else {**epochs, "total_steps": self._total}

    # ------------------------------------------------------------------------------------------------------- inside

    def _opened(self, caller: str) -> Lifecycle:
        if self._life is None:
            raise ConfigError(
                f"{caller}: nothing would be saved yet: call run.resumable(model=model, optimizer=optimizer) before"
            )
        return self._life
