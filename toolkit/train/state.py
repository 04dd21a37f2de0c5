"""What a checkpoint of a run holds: the strategy's state, the loader's position, and what ties it to its run."""

from __future__ import annotations

import json
import os
import platform
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base.errors import ConfigError, listing
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.reader import Loaded
from toolkit.config import FIXED_ON_RESUME, JobConfig, value_of
from toolkit.data.loader import Batches
from toolkit.devices import accelerator
from toolkit.files.rundir import TRACE_VARIABLE
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json, PerRank, State
from toolkit.strategies.protocol import InRounds

MESH = "strategy.mesh"
#: Key in a checkpoint's identity: the data set that the order of samples belongs to.
DATA = "the data set"


def identity(config: JobConfig) -> dict[str, Json]:
    """Return the values that tie a checkpoint to its run (``FIXED_ON_RESUME``), and the mesh, which may change."""
    mesh = {name: size for name, size in asdict(config.strategy.mesh).items() if size is not None}
    return {**{key: value_of(config, key) for key in FIXED_ON_RESUME}, MESH: mesh}


def saves_asked() -> Collection[int]:
    """Return the steps after which a run is to be saved besides what its config says, by the brief for a trace."""
    return frozenset(json.loads(os.environ.get(TRACE_VARIABLE, "{}")).get("saves", ()))


def conditions(session: Session) -> dict[str, Json]:
    """Return what a resume needs, besides the run's identity, to reproduce every bit."""
    if session.device.type != "cpu":
        processor = accelerator.name_of(session.device)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text().split("\n")
            names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
            processor = names[0] if names else platform.machine()
        except OSError:
            processor = platform.processor()
    return {
        "world size": session.world_size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor,
    }


class Checkpointed(Protocol):
    """What checkpoints need of a :class:`~toolkit.strategies.protocol.Strategy`, or of a user's own loop."""

    def state(self) -> State: ...

    def loaded(self, values: Mapping[str, Json]) -> None: ...

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]: ...


@runtime_checkable
class Fitting(Protocol):
    """State whose places depend on what a checkpoint holds."""

    def places(self, manifest: Manifest) -> State:
        """Return what is to be filled from the checkpoint; no collective."""


class TrainingState:
    """What one rank saves and restores. Every rank makes the same calls."""

    def __init__(
        self, session: Session, source: Checkpointed, identity: Mapping[str, Json], best_by: str | None = None
    ) -> None:
        self._session = session
        self.source = source  #: the strategy, or the objects of a user's own loop
        self._loader: Batches | None = None
        self._position = f"data/rank{session.rank}"
        self.identity: dict[str, Json] = dict(identity)
        self._best_by = best_by  #: the ``keep_best`` metric
        self.best: float | None = None  #: the best figure so far of that metric; higher is better
        self._conditions = conditions(session)

    @property
    def meta(self) -> dict[str, Json]:
        """Return what rank 0 writes down in each checkpoint about the run."""
        return {"identity": self.identity, "conditions": self._conditions, "best": self.best, "best_by": self._best_by}

    def include(self, loader: Batches) -> None:
        """Save the position of ``loader`` with the strategy's state, and restore it at a resume.

        Raises ConfigError on all ranks where their data sets differ.
        """
        self._loader = loader
        data = loader.fingerprint()
        if data is None:
            return
        self.identity = {**self.identity, DATA: data}
        if self._session.world_size == 1 or not dist.is_initialized():
            return
        # A rank with fewer samples would later leave the others waiting. A folder that is listed while files arrive, or
        # a stale copy on a node's own disk, gives ranks different sets. What most ranks have is taken for right.
        size = int(data.split()[0])  # a fingerprint begins with the number of samples
        row = torch.tensor([size, zlib.crc32(data.encode())], dtype=torch.int64, device=self._session.device)
        rows = [(int(samples), int(crc)) for samples, crc in gather_rows(row).tolist()]
        usual = Counter(rows).most_common(1)[0][0]
        others: list[str] = []
        for rank, (samples, crc) in enumerate(rows):
            if (samples, crc) != usual:
                but = ", but others" if samples == usual[0] else ""
                others.append(f"rank {rank} has {samples} samples{but}")
        if others:
            raise ConfigError(
                f"data: the ranks have different data sets: {listing(others, 8)}; most ranks have {usual[0]} samples. "
                "See that all nodes have the same files (data.root), that none is being written, and that the job's "
                "order, if it has one, is the same on each rank; then start again"
            )

    def now(self) -> State:
        """Return the state as it is, of live tensors."""
        return {**self.source.state(), **self._place_of_loader()}

    def _place_of_loader(self) -> State:
        """Return the loader's position, if it is this rank's own."""
        position = None if self._loader is None else self._loader.state()
        return {} if position is None else {self._position: PerRank(position)}

    def places(self) -> State | Callable[[Manifest], State]:
        """Return what is to be filled from a checkpoint, or a function of the checkpoint's manifest that does."""
        source = self.source
        if isinstance(source, Fitting):
            return source.places
        if not isinstance(source, InRounds):
            return self.now()

        def entered(manifest: Manifest) -> State:
            names = [*manifest.tensors, *manifest.values]
            return {**source.enter(manifest.step, names), **self._place_of_loader()}

        return entered

    def restore(self, loaded: Loaded) -> None:
        """Hand over what was loaded besides the tensors, and restore the loader's position."""
        self.source.loaded({**loaded.values, "step": loaded.step})
        if self._loader is not None and self._position in loaded.values:
            self._loader.restore(loaded.values[self._position])
        self.restore_best(loaded.meta)

    def restore_best(self, meta: Mapping[str, Json]) -> None:
        """Take over the best figure in a checkpoint's ``meta``, if of the same metric."""
        best = meta.get("best")
        # A figure of another metric would keep every worse state from being saved as the best.
        is_same = meta.get("best_by", self._best_by) == self._best_by
        self.best = float(best) if is_same and isinstance(best, (int, float)) else None
