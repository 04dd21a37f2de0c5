"""Copies of runs' metrics in trackers of experiments. A login node makes them from the runs' files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from toolkit import registry
from toolkit.base.errors import RequestError, ToolkitError, TrackerError
from toolkit.files.run_files import RunState
from toolkit.metrics.lines import MetricsLine


def build_tracker(name: str, run: RunIdentity) -> Tracker:
    """Return the tracker for one run. Raises RequestError if its library is not installed."""
    try:
        tracker: Tracker = registry.find("trackers", name)(run)
    except ImportError as error:
        raise RequestError(f"{name} cannot be imported ({error}): pip install {name}") from None
    return tracker


#: Values by step and tag.
Points: TypeAlias = Mapping[tuple[int, str], float]


@dataclass(frozen=True)
class RunIdentity:
    """The run whose metrics are sent."""

    id: str
    name: str  #: of its config
    project: str
    begun: float  #: seconds since the epoch
    config: Mapping[str, str]  #: by dotted key, without secrets


class Tracker(Protocol):
    """A tracker with one run in it, which is called a copy. Every method may raise TrackerError."""

    place: str  #: server or file, and the project; without passwords
    lines_at_once: int  #: for one call of :meth:`send`

    def open(self, remote: str | None) -> tuple[str, bool]:
        """Find the copy, or make one. Return its id there, and whether it was found.

        ``remote`` is the id that an earlier call has returned. None if that is not known: then the copy is looked for.
        """

    def tag(self, tag: str) -> str:
        """Return the name of a metric there."""

    def received(self, since: int) -> Points | int:
        """Return the copy's values from step ``since`` on, by step and its own tags.

        A tracker that takes whole lines in the order of their steps returns the last step that it has; -1 if none.
        """

    def send(self, lines: Sequence[MetricsLine]) -> None:
        """Add values. They are there for good when this returns; if it raises, some may be."""

    def clear(self) -> str:
        """Remove the copy, and make an empty one. Return its id."""

    def close(self, state: RunState | None) -> None:
        """End the work. ``state`` is how the run ended; None if it is unfinished."""


@contextlib.contextmanager
def answering(place: str) -> Iterator[None]:
    """Turn whatever a tracker's library raises into a TrackerError that says where and why."""
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:  # each library raises others, and those of the libraries below it
        text = without_password(" ".join(str(error).split()))
        why = f"{type(error).__name__}: {text[:300]}"
        raise TrackerError(
            f"{place} did not take the metrics ({why}); nothing is lost: the same command continues where it stopped"
        ) from error


def without_password(text: str) -> str:
    """Return ``text`` with user and password left out of the addresses in it."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)
