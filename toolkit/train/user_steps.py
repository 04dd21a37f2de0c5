"""What comes between the steps of a user's loop: writes, saves and agreed stops, where they are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit import hang
from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.reader import Loaded
from toolkit.config import JobConfig
from toolkit.ranks.collectives import gather_by_name
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.train.ddp_buckets import DdpBuckets
from toolkit.train.describe import describe_script, hparams_of_script
from toolkit.train.engine import NOT_FINITE, LoopEngine
from toolkit.train.handed_over import Accumulation
from toolkit.train.loss_windows import LossWindow, gather_json
from toolkit.train.not_finite import NotFinite
from toolkit.train.same_calls import SameCalls
from toolkit.train.user_state import UserState

log = logs.get(__name__)


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


class UserSteps(LoopEngine):
    """One rank's steps of a user's own loop, or of a library's. Every rank makes the same calls."""

    def __init__(self, config: JobConfig, session: Session) -> None:
        super().__init__(config.train, session)
        self.config = config  #: the whole config, resolved
        device = session.device
        by_rank, gather = partial(gather_by_name, device=device), partial(gather_json, device=device)
        self._window = LossWindow(session.rank, session.world_size, by_rank, gather)
        self._state: UserState | None = None
        self._is_open = False  #: resumed, so that steps can be made
        self._buckets = DdpBuckets()
        self._stack.callback(self._buckets.close)
        self._calls = SameCalls(session, lambda: 2 * self.step + self._in_step)
        self._stack.callback(self._calls.close)
        self._at = LoopPosition()
        self._epochs: int | None = None  #: the epoch at which the phase in progress ends; None outside of one
        self._phases = 0  #: calls of TrainingRun.epochs in this attempt
        self._phase, self._first_epoch = -1, 0  #: the last one that has begun in this run, and its first epoch
        self._accumulation = Accumulation(())
        self._has_warned_of_idle = False
        self._is_checked = False  #: that all can be saved, after an attempt's first step
        self._figured = -1  #: the step that has the figures of every loop already
        self._save_asked = False  #: by the loop
        self._has_logged = False  #: outside of a step, since the last write
        self._latest: dict[str, Tensor | float] = {}  #: what a traced step has logged last, by tag
        self._has_left = False  #: the loop was begun and has not come to its end

    def _open(self) -> Loaded | None:
        """Fill the state from the newest good checkpoint, if any, and begin the attempt there."""
        self._not_finite = NotFinite(self.config.train, self._session)
        loaded = self._resume(partial(describe_script, self.config, self._session.run_dir))
        self._is_open = True
        if self.config.checkpoint.keep_best is not None:
            log.warning("checkpoint.keep_best is for jobs with an evaluate(): of this loop the newest checkpoints stay")
        return loaded

    def _mark_completed(self) -> dict[str, Any]:
        """Mark the run as completed in TensorBoard, where it has hyper-parameters to show. Return its result."""
        if hparams_of_script(self.config, self._session.run_dir):
            self._sink.completed(self.step)
        return {"step": self.step, "epoch": self._at.epoch, "samples": None, "metrics": dict(self._metrics)}

    def _count_step(self) -> None:
        """Count the step in progress, if there is one. A step that was left by a ``break`` counts too.

        What is due after that one is done after the next step: a resume repeats what comes between two epochs.
        """
        if self._in_step:
            self._at.batch += 1
            self._accumulation.end_step()
            if self._trace is not None and self._state is not None:
                logged = self._latest
                loss = torch.as_tensor(logged.get("train/loss", 0.0)) / self._session.world_size
                self._trace.take_end(loss, self._state.live(), logged, self._state.parts())
        super()._count_step()

    def _after_step(self) -> bool:
        if self._accumulation.is_open:
            return False
        # The first save may be due after half an hour: check now what it needs.
        if not self._is_checked and self._state is not None:
            self._is_checked = True
            self._state.check()
        if self._save_asked and not self._save_due:
            self._calls.meet("called run.save()")
        self._save_due, self._save_asked = self._save_due or self._save_asked, False
        if self._save_due and (waited := self._accumulation.waited) and not self._has_warned_of_idle:
            self._has_warned_of_idle = True
            log.warning(
                "step %d is saved, and no optimizer of run.resumable has made a step since step %d: if the loop has "
                "replaced it, a resume has the old one. Keep one optimizer: give it groups by add_param_group, and set "
                "their rates",
                self.step,
                self.step - waited,
            )
        return True

    def _meet(self, what: str, advice: str = "") -> None:
        """Wait for all ranks to have done ``what``. Write what any of them has logged outside of a step."""
        if self._calls.meet(what, has=self._has_logged, advice=advice):
            self._has_logged = False
            self._write()

    def _write(self) -> None:
        # The loop may be in a step or between two: the phase before comes back at the end.
        phase, self._activity.phase = self._activity.phase, hang.LOGGING
        means, _ = self._window.take()
        self._metrics |= means
        self._write_figures(means | self._new_figures())
        # Last: what ends the run must not keep its figures from the files.
        judged = self._judged(means)
        if NOT_FINITE in judged:
            self._sink.scalars(self.step, {NOT_FINITE: judged[NOT_FINITE]})
        self._activity.phase = phase

    def _new_figures(self) -> dict[str, float]:
        """Return the figures of every loop, once for each step. After a resume nothing was measured yet."""
        if self._figured == self.step:
            return {}
        self._figured = self.step
        return self._figures()

    def _save_the_end(self) -> None:
        """Save after the last step, unless that is done. Nothing comes after this save, so it must be made."""
        self._checkpoints.saver.await_save(self.step)
        if self._checkpoints.saver.newest != self.step and not self._save(must=True):
            self._not_finite.refuse(self.step)

    def _may_save(self, *, must: bool) -> bool:
        assert self._state is not None
        return self._not_finite.may_save(self.step, self._state)

    def _saved_with(self) -> dict[str, Json]:
        here = {name: float(value) for name, value in vars(self._at).items()}
        rows = torch.stack([*gather_by_name(here, self._session.device).values()], dim=1).long().tolist()
        # The epochs of `run.steps(loader, total=n)` may end at other steps on other ranks.
        by_rank: dict[str, Json] = {"positions": rows} if rows.count(rows[0]) < len(rows) else {}
        return {**super()._saved_with(), **self._position(), **by_rank}

    def _position(self) -> dict[str, Json]:
        phase: dict[str, Json] = {"phase": self._phase, "first_epoch": self._first_epoch}
        return {"position": list(astuple(self._at)), "ddp_orders": self._buckets.orders(), **phase}

    def _restore(self, meta: Mapping[str, Any]) -> None:
        super()._restore(meta)
        self._figured = self.step
        self._buckets.take(meta)
        self._at = LoopPosition(*meta["position"])
        self._phase, self._first_epoch = meta["phase"], meta["first_epoch"]
        positions = meta.get("positions", [])
        if len(positions) == self._session.world_size:
            self._at = LoopPosition(*positions[self._session.rank])
        elif positions and self._session.is_main:
            log.warning(
                "the ranks of this checkpoint were at different places of their loaders, %s by epoch, place and batch; "
                "on another number of ranks all go on from the first one's",
                positions,
            )

    def _progress(self) -> dict[str, Any]:
        return {} if self._epochs is None else {"epoch": self._at.epoch, "epochs": self._epochs}

    def _require_open(self, caller: str) -> None:
        if not self._is_open:
            raise ConfigError(
                f"{caller}: nothing would be saved yet: call run.resumable(model=model, optimizer=optimizer) before"
            )
