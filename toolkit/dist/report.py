"""How a rank tells the outside how far it is: through the supervisor's store, or by files when nobody supervises."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from torch.distributed import Store

from toolkit import logs, records, rundir
from toolkit.activity import Activity
from toolkit.errors import EXIT_FAILED
from toolkit.records import COUNT, TEXT, Misfit, OrNull, Record
from toolkit.rundir import RunDir

RESULT_KEY = "toolkit/result"
HEARTBEAT_S = 0.5

log = logs.get(__name__)


#: What the supervisor reads in a report of any rank, and in rank 0's besides.
_DOING: Mapping[str, Any] = {"doing": str, "done": (int, type(None)), "count": int}
_PROGRESS = Record({**rundir.PROGRESS.keys, "doing": TEXT, "done": OrNull(COUNT), "count": COUNT})
_RESULT = Record({key: shape for key, shape in rundir.RESULT.keys.items() if key != "state"})


def rank_key(rank: int) -> str:
    """The store key that holds a rank's latest report."""
    return f"toolkit/rank/{rank}"


def parse_report(text: bytes, rank: int) -> dict[str, Any] | None:
    """Return a rank's report from the store; None for what none of our ranks can have written.

    Of another rank than 0 it is what the rank is doing, and no more.
    The store knows no user: any process that reaches its port may write any key.
    """
    if rank == 0:
        return _parse(text, _PROGRESS)
    with contextlib.suppress(ValueError, RecursionError):  # of thousands of ranks, each second: no shape, and no more
        value = json.loads(text)
        if isinstance(value, dict) and all(isinstance(value.get(key, ...), kinds) for key, kinds in _DOING.items()):
            return {key: value[key] for key in _DOING}
    return None


def parse_result(text: bytes) -> dict[str, Any] | None:
    """Return the run's result from the store; None as for :func:`parse_report`."""
    return _parse(text, _RESULT)


def _parse(text: bytes, shape: Record) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = records.parse(text, shape)
    except Misfit:
        return None
    return found


class Reporter(Protocol):
    """Takes a rank's progress and its result."""

    def progress(self, **fields: Any) -> None:
        """Note where the rank is; never blocks on I/O."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand over the result of the whole run."""

    def close(self) -> None:
        """Send what is still to be sent and stop."""


class _Latest:
    """The newest report and a thread that publishes it: a slow store or disk never delays a step."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._fields: dict[str, Any] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="toolkit-report", daemon=True)

    def progress(self, **fields: Any) -> None:
        self._fields = {**self._fields, **fields, "time": time.time()}  # one assignment: the thread sees old or new

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._publish(self._fields)

    def _publish(self, fields: dict[str, Any]) -> None:
        raise AssertionError("each reporter publishes in its own way")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._publish(self._fields)


class StoreReporter(_Latest):
    """Reports to the supervisor's store, on a client of its own (a client serialises its calls).

    Each report says what the rank is doing, and differs from the one before it also where nothing else does: that is
    the sign of life by which the supervisor tells a rank that waits from one that is stopped, cut off or dead.

    The connection is the rank's lifeline too: without a supervisor nobody would end this rank, so it ends itself.
    """

    def __init__(self, store: Store, rank: int, activity: Activity) -> None:
        # The other ranks' reports are passed on once a second: more of them would only load the store.
        super().__init__(HEARTBEAT_S if rank == 0 else 2 * HEARTBEAT_S)
        self._store = store
        self._rank = rank
        self._activity = activity
        self._beat = 0
        self._thread.start()

    def _publish(self, fields: dict[str, Any]) -> None:
        now, self._beat = self._activity, self._beat + 1
        doing = {"doing": now.phase, "done": now.step, "count": now.count, "beat": self._beat}
        try:
            self._store.set(rank_key(self._rank), json.dumps({**fields, **doing}))
        except RuntimeError:  # torch's DistNetworkError and kin
            if self._closed.is_set():  # the attempt is over on both sides
                return
            log.error("the supervisor's store is gone, so the supervisor is: this rank ends")
            os._exit(EXIT_FAILED)  # the main thread may hang in a collective and would never see an exception

    def finish(self, result: Mapping[str, Any]) -> None:
        if self._rank == 0:
            self._store.set(RESULT_KEY, json.dumps(dict(result)))


class FileReporter(_Latest):
    """Rank 0 of an unsupervised run writes ``status.json`` and ``result.json`` itself."""

    def __init__(self, run: RunDir, status: Mapping[str, Any]) -> None:
        super().__init__(HEARTBEAT_S)
        self._run_dir = run
        self._status = dict(status)
        self._started = time.time()
        self._run_dir.clear_result()
        self._thread.start()

    def _publish(self, fields: dict[str, Any]) -> None:
        status = {**self._status, "state": "running", "updated": time.time(), "progress": fields}
        with contextlib.suppress(OSError):  # a full disk; the next one is a second away
            self._run_dir.write_status(status)

    def finish(self, result: Mapping[str, Any]) -> None:
        wall_s = round(time.time() - self._started, 3)
        self._run_dir.write_result({"state": "completed", "attempts": 1, **result, "wall_s": wall_s})
        self._status["ended"] = time.time()

    def close(self) -> None:
        super().close()
        state = "completed" if "ended" in self._status else "failed"
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            self._run_dir.write_status({**self._run_dir.status(), "state": state})


class NullReporter:
    """For the other ranks of an unsupervised run: nobody listens."""

    def progress(self, **fields: Any) -> None:
        """Nothing."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
