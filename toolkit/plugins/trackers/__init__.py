"""Copies of runs' metrics in trackers of experiments. A login node makes them from the runs' files."""

from __future__ import annotations

from importlib import import_module

from toolkit.errors import RequestError
from toolkit.plugins.trackers.protocol import RunIdentity, Tracker

#: The class of each tracker, in the module of its name.
TRACKERS = {"mlflow": "Mlflow", "trackio": "Trackio", "wandb": "Wandb"}


def build_tracker(name: str, run: RunIdentity) -> Tracker:
    """Return the tracker for one run. Raises RequestError if its library is not installed."""
    try:
        tracker: Tracker = getattr(import_module(f"toolkit.plugins.trackers.{name}"), TRACKERS[name])(run)
    except ImportError as error:
        raise RequestError(f"{name} cannot be imported ({error}): pip install {name}") from None
    return tracker
