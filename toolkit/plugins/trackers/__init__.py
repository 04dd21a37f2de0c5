"""Copies of runs' metrics in trackers of experiments. A login node makes them from the runs' files."""

from __future__ import annotations

from toolkit import registry
from toolkit.base.errors import RequestError
from toolkit.plugins.trackers.protocol import RunIdentity, Tracker


def build_tracker(name: str, run: RunIdentity) -> Tracker:
    """Return the tracker for one run. Raises RequestError if its library is not installed."""
    try:
        tracker: Tracker = registry.find("trackers", name)(run)
    except ImportError as error:
        raise RequestError(f"{name} cannot be imported ({error}): pip install {name}") from None
    return tracker
