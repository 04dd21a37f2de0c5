"""The place of a rank in the grid: ranks of a pipeline x its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import StrategyConfig, mesh_of
from toolkit.ranks.batch import Share


@dataclass(frozen=True)
class Grid:
    """The ranks as ``ranks`` x ``replicas``, seen from ``rank``. A rank's ``place`` is its number in its pipeline."""

    ranks: int  #: of a pipeline
    replicas: int
    rank: int
    stages_per_rank: int

    @classmethod
    def of(cls, config: StrategyConfig, rank: int, world_size: int) -> Grid:
        """Return the grid that the config asks for. Raises ConfigError if it does not match the number of ranks."""
        sizes = mesh_of(config, world_size)
        ranks = sizes.stages or 1
        interleaves = config.pipeline.schedule == "interleaved" and ranks > 1
        return cls(ranks, sizes.replicas or 1, rank, config.pipeline.stages_per_rank if interleaves else 1)

    @property
    def place(self) -> int:
        return self.rank // self.replicas

    @property
    def share(self) -> Share:
        """Return the part of the global batch, which all ranks of a pipeline hold."""
        return Share(self.rank % self.replicas, self.replicas)

    @property
    def first_replica(self) -> int:
        """Return the first of the ranks that hold the same stages as this one."""
        return self.place * self.replicas

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage."""
        return self.place == self.ranks - 1

    @property
    def count(self) -> int:
        """Return the number of stages."""
        return self.ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> range:
        """Return the stages of ``rank``. With p ranks, place k has the stages k, k + p, k + 2p, ..."""
        return range(rank // self.replicas, self.count, self.ranks)

    @property
    def stages(self) -> range:
        """Return this rank's stages."""
        return self.stages_of(self.rank)
