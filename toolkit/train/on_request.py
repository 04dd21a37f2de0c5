"""Profiles that users ask of ranks that train. A profile begins between two steps, on all ranks before the same one.

The ranks agree on the step by the gate, as for a stop. There rank 0 reads the request and tells the others.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.base import logs
from toolkit.base.errors import RequestError
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.run.records import stop_request
from toolkit.run.records.stop_request import Answer, UserRequest

if TYPE_CHECKING:
    from toolkit.train.profile import StepProfile

log = logs.get(__name__)


class OnRequest:
    """Profiles steps, on one rank. Every rank makes the same calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = RunDir(session.run_dir)
        self._seen: set[str] = set()
        self._profile: StepProfile | None = None  #: of this rank, the newest one
        self._profiled_until = 0  #: a rank, and all know it
        self._step = 0  #: the last one of a profile
        self.is_recording = False  #: whether this rank's profile still records, and does not just write its files

    def pass_step(self, step: int) -> None:
        """Mark the end of a step. Called after each while ``is_recording``."""
        assert self._profile is not None
        self.is_recording = self._profile.pass_step(step)
        self._step = step

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
        if not told:
            return
        request = UserRequest.from_json(told)
        self._profiled_until = step + request.steps
        if request.rank == self._session.rank:
            self._begin(request_id, request, step)

    def _begin(self, request_id: str, request: UserRequest, step: int) -> None:
        log.info("step %d: profiling %d steps", step, request.steps)
        answer = partial(self._answer, request_id)
        try:
            from toolkit.train.profile import StepProfile

            folder = self._run.path / "profiles"
            self._profile = StepProfile(folder, request.rank, step, request.steps, memory=request.memory, answer=answer)
            self.is_recording = True
        except Exception as error:  # the job's own profiler runs, for example
            log.warning("no profile can be made: %s: %s", type(error).__name__, error)
            answer(Answer(refused=f"no profile can be made: {error}"))

    def _decide(self, request_id: str, step: int) -> dict[str, Any]:
        """Return the request, on rank 0. Empty where it is answered or withdrawn, or cannot be carried out."""
        try:
            request = stop_request.read(self._run, request_id)
            if request is None or not self._session.owns_run():
                return {}
            if step < self._profiled_until:
                raise RequestError(f"a profile is being made up to step {self._profiled_until}: ask again after it")
            if request.rank >= self._session.world_size:
                raise RequestError(f"there is no rank {request.rank}")
            return request.to_json()
        except (OSError, RequestError) as error:
            log.warning("a user's request is not carried out: %s", error)
            self._answer(request_id, Answer(refused=f"nothing was done: {error}"))
            return {}

    def _answer(self, request_id: str, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the command says that there was no answer
            stop_request.answer(self._run, request_id, answer)
