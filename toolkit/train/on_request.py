"""What users ask of ranks that train. It is done between two steps, on all ranks before the same one.

The ranks agree on the step by the gate, as for a stop. There rank 0 reads the request and tells the others. It writes
new values into the run's history before a rank makes a step with them, so no checkpoint holds a step that a restart
would make otherwise.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.base import logs
from toolkit.base.errors import RequestError
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.run.prepare import live_values
from toolkit.run.records import changes, stop_request
from toolkit.run.records.changes import Change
from toolkit.run.records.stop_request import Answer, UserRequest, Wish

if TYPE_CHECKING:
    from toolkit.train.profile import StepProfile

log = logs.get(__name__)


class OnRequest:
    """Sets values, and profiles steps, on one rank. Every rank makes the same calls."""

    def __init__(self, session: Session, adopt: Callable[[Mapping[str, Any]], None]) -> None:
        """Set up. ``adopt`` takes new values of the config by key, on every rank."""
        self._session, self._adopt = session, adopt
        self._run = RunDir(session.run_dir)
        self._seen: set[str] = set()
        self._ahead: list[tuple[int, str, Any]] = []  #: values that hold from a later step on, by step
        self._profile: StepProfile | None = None  #: of this rank, the newest one
        self._is_recording = False  #: whether that one still records, and does not just write its files
        self._profiled_until = 0  #: a rank, and all know it
        self._step = 0  #: the last one that had something to do
        self.next_step: float = math.inf  #: before it there is nothing to do

    def resume(self, step: int) -> None:
        """Take the values that were set before ``step``. Others are set again at their steps."""
        known = self._session.from_main("changes", lambda: changes.in_force(changes.read(self._run)))
        for at, key, value in self._held_from(known, step):
            if at < step:
                self._set(step, {key: value})

    def pass_step(self, step: int) -> None:
        """Do what is due after ``step`` steps. Called where ``next_step`` is reached."""
        while self._ahead and self._ahead[0][0] <= step:
            _, key, value = self._ahead.pop(0)
            self._set(step, {key: value})
        if self._profile is not None and self._is_recording:
            self._is_recording = self._profile.pass_step(step)
        self._step = step
        self._plan()

    def close(self) -> None:
        """End a profile that is being made, and wait a while for its files."""
        if self._profile is not None:
            self._profile.close(self._step)

    def carry_out(self, kind: str, step: int) -> None:
        """Do what is asked for under the agreed ``kind``, once in an attempt."""
        request_id = kind.removeprefix(stop_request.KIND)
        if request_id in self._seen:
            return
        self._seen.add(request_id)
        told = self._session.from_main(f"request/{request_id}", partial(self._decide, request_id, step))
        if "values" in told:
            self._held_from(told["held"], step + 1)
            self._set(step, told["values"])
        if "profile" in told:
            request = UserRequest.from_json(told["profile"])
            self._profiled_until = step + request.steps
            if request.rank == self._session.rank:
                log.info("step %d: profiling %d steps", step, request.steps)
                folder, answer = self._run.path / "profiles", partial(self._answer, request_id)
                try:
                    from toolkit.train.profile import StepProfile

                    self._profile = StepProfile(
                        folder, request.rank, step, request.steps, memory=request.memory, answer=answer
                    )
                    self._is_recording = True
                except Exception as error:  # the job's own profiler runs, for example
                    log.warning("no profile can be made: %s: %s", type(error).__name__, error)
                    answer(Answer(refused=f"no profile can be made: {error}"))
                self._plan()

    def _held_from(self, held: list[tuple[int, str, Any]], step: int) -> list[tuple[int, str, Any]]:
        """Keep the values of ``held`` whose time is ``step`` or later. Return all of ``held``."""
        self._ahead = [(at, key, value) for at, key, value in held if at >= step]
        self._plan()
        return held

    def _plan(self) -> None:
        self.next_step = self._ahead[0][0] if self._ahead else math.inf
        if self._is_recording:  # each of its steps is marked
            self.next_step = 0

    def _set(self, step: int, values: Mapping[str, Any]) -> None:
        log.info("step %d: %s", step, ", ".join(f"{key}={value}" for key, value in values.items()))
        self._adopt(values)

    # ------------------------------------------------------------------------------------------------ rank 0 alone

    def _decide(self, request_id: str, step: int) -> dict[str, Any]:
        """Return what all ranks are to do. Empty where the request is answered or withdrawn, or cannot be done."""
        try:
            request = stop_request.read(self._run, request_id)
            if request is None or not self._session.owns_run():
                return {}
            if request.wish is Wish.PROFILE:
                if step < self._profiled_until:
                    raise RequestError(f"a profile is being made up to step {self._profiled_until}: ask again after it")
                if request.rank >= self._session.world_size:
                    raise RequestError(f"there is no rank {request.rank}")
                return {"profile": request.to_json()}
            return self._record(request_id, request.values, step)
        except (OSError, RequestError) as error:
            # A full disk, for example. The training goes on with the values that it had.
            log.warning("a user's request is not carried out: %s", error)
            self._answer(request_id, Answer(refused=f"nothing was done: {error}"))
            return {}

    def _record(self, request_id: str, values: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Write the values into the history. An attempt before may have done so, and died before it could answer."""
        lines = changes.read(self._run)
        earlier = [line.step for line in lines if line.request == request_id]
        told: dict[str, Any] = {}
        if not earlier:
            # Another version of the toolkit, or another program, may have made the request. What is in the history once
            # is set at each start.
            live_values.checked(self._run, [f"{key}={changes.written(value)}" for key, value in values.items()])
            line = Change(time.time(), values, step=step, request=request_id)
            changes.append(self._run, line)
            told = {"values": dict(values), "held": changes.in_force([*lines, line])}
        since = earlier[0] if earlier else step
        self._answer(request_id, Answer(attempt=self._session.attempt, step=since))
        return told

    def _answer(self, request_id: str, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the command says that there was no answer
            stop_request.answer(self._run, request_id, answer)
