"""Weights & Biases: the server of ``WANDB_BASE_URL``, with the key that `wandb login` has stored."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.base.errors import RequestError, TrackerError
from toolkit.files.run_files import RunState
from toolkit.metrics.lines import MetricsLine
from toolkit.plugins.trackers import RunIdentity, translate_errors, without_password

#: A server may show rows some seconds after it has taken them.
_TRIES, _BETWEEN_S = 5, 2.0
_TIMEOUT_S = 30


class Wandb:
    """A run of wandb: rows in the order of their steps.

    Rows can be neither changed nor taken back. wandb sends from a process of its own, and does not say whether all has
    arrived. So the server is asked each time for the last step that it has.
    """

    lines_at_once = 20_000  # each call opens and closes the run, which takes seconds

    def __init__(self, run: RunIdentity) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        settings = wandb.setup().settings
        if settings.mode not in ("online", "shared"):
            raise RequestError(
                f"wandb is set to {settings.mode!r}, and toolkit upload sends to its server: unset WANDB_MODE"
            )
        self._wandb, self._run = wandb, run
        self._id = run.id
        self._api: Any = None
        server = without_password(str(settings.base_url))
        self.place = f"wandb at {server}, project {run.project}"

    def open(self, remote: str | None) -> tuple[str, bool]:
        with translate_errors(self.place):
            self._api = self._wandb.Api(timeout=_TIMEOUT_S)
            self._id = remote or self._run.id
            is_found = self._found() is not None
            if remote is None and not is_found and (other := self._newest_copy()) is not None:
                self._id, is_found = other, True
        if remote is not None and not is_found:
            self._id = self._new_id()
        return self._id, is_found

    def _new_id(self) -> str:
        """Return an id that this run has not had. wandb does not take the id of a deleted run again."""
        return f"{self._run.id}-{secrets.token_hex(2)}"

    def _found(self) -> Any:
        """Return the run as the server has it now; None if it has none."""
        self._api.flush()  # it remembers what it has read
        return self._looked_up(lambda: self._api.run(f"{self._run.project}/{self._id}"))

    def _newest_copy(self) -> str | None:
        """Return the id of the copy that has replaced a deleted one, for a run whose record is lost."""
        filters = {"display_name": self._run.id}
        copies = self._looked_up(lambda: [*self._api.runs(self._run.project, filters=filters, order="-created_at")])
        ids = [str(copy.id) for copy in copies or []]
        return next((each for each in ids if each.startswith(f"{self._run.id}-")), None)

    def _looked_up(self, look: Callable[[], Any]) -> Any:
        """Return the result of ``look``; None if the server does not have it."""
        try:
            return look()
        except (ValueError, self._wandb.errors.CommError) as error:
            if "could not find" in str(error).lower():
                return None
            raise

    def tag(self, tag: str) -> str:
        return tag

    def received(self, since: int) -> int:
        """Return the last step of the run; -1 if it has none."""
        with translate_errors(self.place):
            found = self._found()
            return -1 if found is None or found.lastHistoryStep is None else int(found.lastHistoryStep)

    def send(self, lines: Sequence[MetricsLine]) -> None:
        # Few retries with short waits: the next call sends what did not arrive.
        with translate_errors(self.place), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run = self._wandb.init(
                project=self._run.project,
                id=self._id,
                name=self._run.id,
                config=dict(self._run.config),
                resume="allow",
                dir=folder,
                settings=self._wandb.Settings(
                    console="off",
                    init_timeout=_TIMEOUT_S,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    x_file_stream_retry_max=3,
                    x_graphql_retry_max=3,
                    x_file_stream_retry_wait_max_seconds=5,
                    x_graphql_retry_wait_max_seconds=5,
                    save_code=False,
                    disable_git=True,
                ),
            )
            for line in lines:
                run.log({**line.values, "_timestamp": line.wall_time}, step=line.step)
            run.finish()
        # Does the server have all rows?
        step = lines[-1].step
        for _ in range(_TRIES):
            last = self.received(0)
            if last >= step:
                return
            time.sleep(_BETWEEN_S)
        raise TrackerError(f"{self.place} has steps up to {last} of those up to {step}; the next call sends the others")

    def clear(self) -> str:
        with translate_errors(self.place):
            found = self._found()
            if found is not None:
                found.delete()
        self._id = self._new_id()
        return self._id

    def close(self, state: RunState | None) -> None:
        """Do nothing: a run of wandb is closed whenever nothing is sent."""
