"""Hands the requests of users to the ranks of one attempt."""

from __future__ import annotations

import contextlib
import threading

from toolkit.base import logs
from toolkit.base.errors import DamagedFileError
from toolkit.nodes.start.launcher import Store
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.records import user_request
from toolkit.run.records.user_request import Answer, StackGroup, Wish
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.hang_watch import HangWatch

log = logs.get(__name__)


class UserRequests:
    """Looks for requests, and hands on each once in an attempt.

    Stacks are read by the agents. The ranks do all else, at a step on which they agree: the store's agreement is
    proposed, as for a stop, and rank 0 reads what is asked for. A request that was handed on by a supervisor that has
    died since, or in an earlier attempt, is handed on again: the ranks see by its files whether it is still open.
    """

    def __init__(self, context: Context, attempt: Attempt, store: Store, hangs: HangWatch) -> None:
        self._context, self._attempt, self._store, self._hangs = context, attempt, store, hangs
        self._handed_on: set[str] = set()

    def look(self) -> None:
        """Hand on what is new. While the ranks are told to stop, requests wait for the next attempt."""
        if self._attempt.stop is not None or self._attempt.kill_at is not None:
            return
        with contextlib.suppress(OSError):  # the next look is half a second away
            for request_id in user_request.unanswered(self._context.run):
                if request_id not in self._handed_on:
                    self._handed_on.add(request_id)
                    self._hand_on(request_id)

    def _hand_on(self, request_id: str) -> None:
        try:
            request = user_request.read(self._context.run, request_id)
        except DamagedFileError as error:
            self._refuse(request_id, str(error))
            return
        if request is None:
            return
        log.info("a user asks for %s", request.wish)
        run, world_size = self._context.run, self._attempt.plan.world_size
        if request.wish is not Wish.STACKS and self._context.is_foreign:
            why = f"run {run.id} is a script under `toolkit exec`, into whose steps the toolkit cannot look"
            self._refuse(request_id, f"{why}; `toolkit stacks` works")
        elif request.wish is Wish.PROFILE and request.rank >= world_size:
            why = f"run {run.id} has no rank {request.rank}: its ranks are 0 to {world_size - 1}"
            self._refuse(request_id, why)
        elif request.wish is Wish.STACKS:
            # In a thread: a node that hangs takes seconds.
            threading.Thread(target=self._answer_with_stacks, args=[request_id], daemon=True).start()
        else:
            self._store.propose(user_request.KIND + request_id, by=f"`toolkit {request.wish}`")

    def _refuse(self, request_id: str, why: str) -> None:
        user_request.answer(self._context.run, request_id, Answer(refused=why))

    def _answer_with_stacks(self, request_id: str) -> None:
        attempt = self._attempt
        try:
            groups = tuple(
                StackGroup(group.ranks, group.doing, group.still_s, group.stack) for group in self._hangs.read_stacks()
            )
            answer = Answer(attempt=attempt.number, step=attempt.progress.step, groups=groups)
            user_request.answer(self._context.run, request_id, answer)
        except Exception as error:  # the run goes on without the stacks
            log.warning("the stacks cannot be shown: %s: %s", type(error).__name__, error)
            with contextlib.suppress(OSError):  # a full disk: the command says that there was no answer
                self._refuse(request_id, f"the stacks cannot be shown: {error}")
