"""The record of what a tracker has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.plugins.trackers.sync import SyncRecord

SYNC: dict[str, Any] = {
    "version": 1,
    "tracker": "mlflow",
    "place": "mlflow at sqlite:///mlflow.db, experiment name",
    "remote": "0123abcd",
    "end": 4000,
    "sending": 5000,
    "tail": "00ff",
    "sending_tail": "11ee",
    "step": 40,
    "points": 80,
}


def test_each_key_of_a_record_of_what_a_tracker_has_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.json"
    fsio.write_json(path, SYNC)
    record = SyncRecord.read(path)
    assert record is not None
    assert record.to_json() == SYNC, "or a key has no example here"
