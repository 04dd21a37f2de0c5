"""MLflow: a server, or a database of one's own."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from toolkit.files.run_files import RunState
from toolkit.metrics.lines import MetricsLine
from toolkit.plugins.trackers import Points, RunIdentity, translate_errors, without_password

#: The most values and parameters that one request may have, by MLflow's REST API.
_MOST_VALUES, _MOST_PARAMS = 1000, 100
#: The tag by which a run is found again.
_TAG = "toolkit_run_id"
_ENDS = {RunState.COMPLETED: "FINISHED", RunState.FAILED: "FAILED"}


class Mlflow:
    """A run at ``MLFLOW_TRACKING_URI``, in the experiment that has the project's name."""

    lines_at_once = 500

    def __init__(self, run: RunIdentity) -> None:
        # MLflow's own retries take minutes: what is away now is tried again by the next call.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        import mlflow

        self._run = run
        self._uri = mlflow.get_tracking_uri()
        self.place = f"mlflow at {without_password(self._uri)}, experiment {run.project}"
        self._entities = mlflow.entities
        self._new_client = mlflow.MlflowClient
        self._client: Any = None
        self._id = ""

    def open(self, remote: str | None) -> tuple[str, bool]:
        with translate_errors(self.place):
            self._client = self._new_client(self._uri)
            experiment = self._client.get_experiment_by_name(self._run.project)
            self._experiment = (
                experiment.experiment_id if experiment else self._client.create_experiment(self._run.project)
            )
            found = self._client.search_runs([self._experiment], f"tags.`{_TAG}` = '{self._run.id}'")
            ids = [each.info.run_id for each in found]
            if remote in ids or (remote is None and ids):
                self._id = remote or ids[0]
                self._client.update_run(self._id, status="RUNNING")
                return self._id, True
            return self._create(), False

    def _create(self) -> str:
        tags = {_TAG: self._run.id, "toolkit_run_name": self._run.name}
        start_ms = int(1000 * self._run.begun)
        created = self._client.create_run(self._experiment, start_time=start_ms, run_name=self._run.id, tags=tags)
        self._id = created.info.run_id
        params = [self._entities.Param(self.tag(key), value[:500]) for key, value in self._run.config.items() if value]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        return self._id

    def tag(self, tag: str) -> str:
        """Return the name with ``_`` for each character that MLflow refuses."""
        return re.sub(r"[^\w./: -]", "_", tag)

    def received(self, since: int) -> Points:
        with translate_errors(self.place):
            tags = self._client.get_run(self._id).data.metrics
            return {
                (metric.step, tag): metric.value
                for tag in tags
                for metric in self._client.get_metric_history(self._id, tag)
                if metric.step >= since
            }

    def send(self, lines: Sequence[MetricsLine]) -> None:
        values = [
            self._entities.Metric(self.tag(tag), value, int(1000 * line.wall_time), line.step)
            for line in lines
            for tag, value in line.values.items()
        ]
        with translate_errors(self.place):
            for start in range(0, len(values), _MOST_VALUES):
                self._client.log_batch(self._id, metrics=values[start : start + _MOST_VALUES])

    def clear(self) -> str:
        with translate_errors(self.place):
            # The tag goes first: a deleted run can be restored by its owner, and is not to be found as the copy then.
            self._client.delete_tag(self._id, _TAG)
            self._client.delete_run(self._id)
            return self._create()

    def close(self, state: RunState | None) -> None:
        if state is not None:
            with translate_errors(self.place):
                self._client.set_terminated(self._id, status=_ENDS.get(state, "KILLED"))
