"""Copies of runs' metrics in trackers of experiments, made on a login node from the runs' files."""

from __future__ import annotations

from toolkit.errors import RequestError
from toolkit.trackers.protocol import RunIdentity, Tracker


def build_tracker(name: str, run: RunIdentity) -> Tracker:
    """Return the tracker for one run. Raises RequestError if its library is not installed."""
    try:
        if name == "mlflow":
            from toolkit.trackers.mlflow import Mlflow

            return Mlflow(run)
        if name == "trackio":
            from toolkit.trackers.trackio import Trackio

            return Trackio(run)
        from toolkit.trackers.wandb import Wandb

        return Wandb(run)
    except ImportError as error:
        raise RequestError(f"{name} cannot be imported ({error}): pip install {name}") from None
