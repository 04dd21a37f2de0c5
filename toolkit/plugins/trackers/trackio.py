"""Trackio: a database in its own folder (``TRACKIO_DIR``), shown by ``trackio show``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from toolkit.files.run_files import RunState
from toolkit.metrics.lines import MetricsLine
from toolkit.plugins.trackers.protocol import RunIdentity, answering


class Trackio:
    """A run in the database of the project.

    The database is written directly, as trackio's own importers do: `trackio.log` takes no times, and sends from a
    thread that may end with the process.
    """

    lines_at_once = 500

    def __init__(self, run: RunIdentity) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._run = run
        with answering("trackio"):
            self._storage.validate_project_name(run.project)
            self.place = f"trackio in {self._storage.get_project_db_path(run.project)}"

    def open(self, remote: str | None) -> tuple[str, bool]:
        with answering(self.place):
            return self._run.id, self.received(0) >= 0

    def tag(self, tag: str) -> str:
        return tag

    def received(self, since: int) -> int:
        with answering(self.place):
            last = self._storage.get_last_step(self._run.project, self._run.id, run_id=self._run.id)
        return -1 if last is None else int(last)

    def send(self, lines: Sequence[MetricsLine]) -> None:
        rows = [line for line in lines if line.values]
        with answering(self.place):
            # One transaction. A row whose id is in the database already is ignored there.
            self._storage.bulk_log(
                self._run.project,
                self._run.id,
                [dict(line.values) for line in rows],
                steps=[line.step for line in rows],
                timestamps=[datetime.fromtimestamp(line.wall_time, UTC).isoformat() for line in rows],
                config=dict(self._run.config),
                log_ids=[f"{self._run.id}/{line.step}" for line in rows],
                run_id=self._run.id,
            )

    def clear(self) -> str:
        with answering(self.place):
            self._storage.delete_run(self._run.project, self._run.id, run_id=self._run.id)
        return self._run.id

    def close(self, state: RunState | None) -> None:
        """Do nothing: trackio keeps no state of a run."""
