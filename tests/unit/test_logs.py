"""What is left out of a log."""

from __future__ import annotations

import time

import pytest

from toolkit.base import logs


def test_a_warning_that_others_cause_comes_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    warnings = logs.SparseWarnings(logs.get("toolkit.somebody"))
    for _ in range(1000):
        warnings.warn("garbage: %d bytes", 7)
    now += 61.0
    warnings.warn("garbage: %d bytes", 8)
    assert caplog.messages == ["garbage: 7 bytes", "garbage: 8 bytes (999 more since the last such line)"]
