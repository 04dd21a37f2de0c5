"""The place of a rank among the nodes, and its files in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from toolkit.base.errors import CheckpointError
from toolkit.checkpoint.memory_file import Label, MemoryFile, Moment, Pair
from toolkit.checkpoint.memory_links import Role
from toolkit.nodes.agent import state_memory


@dataclass(frozen=True)
class Seat:
    """The place of a rank, and the files that its node's agent holds. They are those of all ranks on the node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    files: Sequence[str]

    @staticmethod
    def of_environment(rank: int, world_size: int, environ: Mapping[str, str]) -> Seat:
        """Read torchrun's variables and the agent's."""
        local_rank, local_world_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
        files = state_memory.paths_of(environ.get(state_memory.VARIABLE, ""))
        return Seat(rank, world_size, local_rank, local_world_size, files)

    @property
    def node(self) -> int:
        """Return the first rank of this node."""
        return self.rank - self.local_rank

    @property
    def shared(self) -> Sequence[str]:
        """Return the files for what all ranks have in common."""
        return self.files[: state_memory.FILES_A_NODE]

    @property
    def own(self) -> Sequence[str]:
        """Return the two files for this rank's own part."""
        start = state_memory.FILES_A_NODE + state_memory.FILES_A_RANK * self.local_rank
        return self.files[start : start + 2]

    @property
    def partner(self) -> Sequence[str]:
        """Return the two files for the part of a rank on another node."""
        start = state_memory.FILES_A_NODE + state_memory.FILES_A_RANK * self.local_rank
        return self.files[start + 2 : start + 4]


class RankFiles:
    """One rank's files: its own part and its partner's. A node's first rank also has those of the common part."""

    def __init__(self, seat: Seat) -> None:
        """Open the files. Raises OSError."""
        self._seat = seat
        self.own, self.partner = Pair(seat.own), Pair(seat.partner)
        self.shared = Pair(seat.shared) if seat.local_rank == 0 else None
        self.loaded: Moment | None = None  #: the moment that this attempt resumes from
        self.arrived: list[Role] = []  #: the parts to be loaded that have come from other nodes

    def held(self) -> list[tuple[int, int, int | None]]:
        """Return what the files of this node hold: attempt, step and part of each."""
        found = []
        for path in self._seat.files:
            with closing(MemoryFile(path)) as file:
                label = file.label()
            if label is not None and label.world_size == self._seat.world_size:
                found.append((*label.moment, label.of))
        return found

    def find(self, moment: Moment, of: int | None) -> MemoryFile:
        """Open the file of this node that holds that part. Raises CheckpointError where none does."""
        wanted = Label(moment, self._seat.world_size, of)
        for path in self._seat.files:
            file = MemoryFile(path)
            if file.label() == wanted:
                return file
            file.close()
        raise CheckpointError(f"no file holds {'the common part' if of is None else f'the part of rank {of}'} any more")

    def keep(self, moment: Moment) -> None:
        """Have the files of ``moment`` overwritten last: the training resumes from them."""
        for pair in (self.own, self.partner, self.shared):
            if pair is not None:
                pair.keep(moment)

    def forget(self, moment: Moment) -> None:
        """Declare all parts of ``moment`` on this node invalid."""
        for path in self._seat.files:
            with closing(MemoryFile(path)) as file:
                label = file.label()
                if label is not None and label.moment == moment:
                    file.invalidate()

    def place(self, role: Role) -> MemoryFile:
        """Return the file for a part that is arriving. Raises OSError where both files are needed for the load."""
        pair = self._pair(role)
        held = pair.next.label()
        if role is not Role.PARTNER and held is not None and held.moment == self.loaded:
            raise OSError("both files hold parts of the step that is being loaded")
        return pair.next

    def take(self, role: Role) -> None:
        """Note that a part has arrived completely."""
        self._pair(role).turn()
        if role is not Role.PARTNER:
            self.arrived.append(role)

    def _pair(self, role: Role) -> Pair:
        pair = {Role.PARTNER: self.partner, Role.OWN: self.own, Role.SHARED: self.shared}[role]
        assert pair is not None
        return pair
