"""The objects of a user's own loop, with the window of its logged means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.checkpoint.manifest import Manifest
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Json
from toolkit.train.log_window import LogWindow
from toolkit.train.resumable import Resumables


class OwnState(Resumables):
    """The objects that a loop hands over, with the window of its logged means."""

    def __init__(self, objects: Mapping[str, Any], session: Session, window: LogWindow) -> None:
        super().__init__(objects, session.rank, session.world_size, session.device)
        self._window = window
        self._is_loaded = False
        self._objects = list(objects.values())

    def has_filled(self, thing: object) -> bool:
        """True if ``thing`` was handed over and filled from a checkpoint."""
        return self._is_loaded and any(thing is found for found in self._objects)

    def state(self) -> dict[str, Entry]:
        return {**super().state(), **self._window.state()}

    def places(self, manifest: Manifest) -> dict[str, Entry]:
        return {**super().places(manifest), **self._window.places(manifest.meta.get("logged", []))}

    def loaded(self, values: Mapping[str, Json]) -> None:
        super().loaded(values)
        self._window.loaded()
        self._is_loaded = True
