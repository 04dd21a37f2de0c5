"""How the ranks agree at a start on a state in memory and load it.

The ranks report to rank 0 what their nodes hold. It picks the newest step of which all parts exist, and has parts sent
to the nodes that lack them: a spare holds nothing, and ranks may be on other nodes than before.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, TypeVar

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, listing
from toolkit.checkpoint.exchange import Exchange, KeyValue, describe, failures_told
from toolkit.checkpoint.manifest import (
    IN_MEMORY,
    CorruptCheckpointError,
    Manifest,
    TensorRecord,
    ValueRecord,
    parse_tensor,
    parse_value,
)
from toolkit.checkpoint.memory_file import Moment
from toolkit.checkpoint.memory_links import Role, Sender
from toolkit.checkpoint.memory_plan import MemoryReport, RestorePlan, Transfer, plan_restore
from toolkit.checkpoint.memory_seat import RankFiles, Seat
from toolkit.checkpoint.reader import Loaded, fill_state
from toolkit.ranks.state import State

KEY = "checkpoint.memory_every_steps"
#: Seconds that the ranks wait for each other at a start.
_TIMEOUT_S = 600.0
#: Seconds between two checks of a rank that waits for a part.
_LOOK_S = 0.02

T = TypeVar("T")
log = logs.get(__name__)


class MemoryLoad:
    """One rank's side of the load at an attempt's start."""

    def __init__(self, seat: Seat, files: RankFiles, attempt: int, kv: KeyValue | None) -> None:
        self._seat, self._files, self._attempt, self._kv = seat, files, attempt, kv
        self._talk = Exchange(
            kv, rank=seat.rank, world_size=seat.world_size, topic=f"memory/{attempt}", number=1, timeout_s=_TIMEOUT_S
        )
        self.is_usable = False  #: True if all ranks have files
        self.partner_told: Mapping[str, Any] | None = None  #: where the partner receives, if there is one

    def publish(self, told: Mapping[str, Any]) -> None:
        """Tell the other ranks where this one receives files, before any is asked to send."""
        assert self._kv is not None
        self._kv.set(self._key(self._seat.rank), json.dumps(told))

    def load(self, places: State | Callable[[Manifest], State], newer_than: int) -> Loaded | None:
        """Fill ``places`` on all ranks, or return None or raise on all; see :meth:`Memory.load`."""
        rank, world_size = self._seat.rank, self._seat.world_size
        with nullcontext() if rank else failures_told(self._talk, "no state was loaded from memory"):
            agreed = self._agree(newer_than)
            # All ranks learn the same plan, so they take the same branches below.
            if agreed.has_partners and self._kv is not None:
                self.partner_told = self._told((rank + self._seat.local_world_size) % world_size)
            self.is_usable = not agreed.without
            if agreed.without and not rank and self._seat.files:
                log.warning("%s is not used: no files for rank %s", KEY, listing([*map(str, agreed.without)], 8))
            if agreed.moment is None:
                return None
            self._files.loaded = moment = agreed.moment
            if agreed.transfers and self._together(partial(self._transfer, moment, agreed)) is None:
                return None
            loaded = self._together(partial(self._fill, places, moment))
        if loaded is None:
            self._files.forget(moment)
            raise CorruptCheckpointError("the state in the nodes' memory cannot be loaded, and a part of it has been")
        if rank == 0:
            log.info("resuming from memory, where step %d is", moment[1])
        return loaded

    def _key(self, rank: int) -> str:
        return f"memory/{self._attempt}/receiver/{rank}"

    def _told(self, rank: int) -> Mapping[str, Any]:
        assert self._kv is not None  # there is another node
        told: Mapping[str, Any] = json.loads(self._kv.get(self._key(rank)))
        return told

    def _agree(self, newer_than: int) -> RestorePlan:
        seat = self._seat
        held = self._files.held() if seat.local_rank == 0 else []
        own = MemoryReport(seat.node, seat.local_world_size, bool(seat.files), held)
        if seat.rank:
            self._talk.report(dataclasses.asdict(own))
            return RestorePlan.of_json(self._talk.listen())
        # Rank 0 alone makes the plan, and all ranks follow it.
        agreed = plan_restore(
            {0: own, **{rank: MemoryReport(**told) for rank, told in self._talk.gather().items()}}, newer_than
        )
        self._talk.tell(dataclasses.asdict(agreed))
        return agreed

    def _together(self, action: Callable[[], T]) -> T | None:
        """Return what ``action`` returns here; None on all ranks if it fails on one. Then a checkpoint is left."""
        result, problems = None, []
        try:
            result = action()
        except Exception as error:
            problems.append(f"rank {self._seat.rank}: {describe(error)}")
        # Every rank reports; rank 0 decides and tells all.
        if self._seat.rank:
            self._talk.report({"problems": problems})
            return result if self._talk.listen()["done"] else None
        problems += [problem for report in self._talk.gather().values() for problem in report["problems"]]
        self._talk.tell({"done": not problems})
        if problems:
            log.warning("the state in memory is not used: %s", "; ".join(problems))
        return None if problems else result

    def _transfer(self, moment: Moment, agreed: RestorePlan) -> bool:
        """Send and receive this rank's part of the transfers."""
        assert self._kv is not None  # there is another node
        rank, failed = self._seat.rank, f"memory/{self._attempt}/failed"
        # Send first; what other ranks send arrives in the receiver's threads meanwhile.
        try:
            for transfer in agreed.transfers:
                if transfer.source == rank:
                    self._send(moment, transfer)
        except Exception:
            self._kv.set(failed, "1")  # waiting ranks learn of the failure before their timeout
            raise
        expected = sum(transfer.target == rank for transfer in agreed.transfers)
        deadline = time.monotonic() + _TIMEOUT_S
        # Wait for the parts that come to this rank, unless another rank has failed.
        while len(self._files.arrived) < expected:
            if self._kv.check([failed]) or time.monotonic() > deadline:
                raise CheckpointError("a part did not come from another node")
            time.sleep(_LOOK_S)
        if expected:
            log.info("%d parts of the state in memory came from other nodes", expected)
        return True

    def _send(self, moment: Moment, transfer: Transfer) -> None:
        role = Role.SHARED if transfer.of is None else Role.OWN
        with (
            closing(self._files.find(moment, transfer.of)) as file,
            closing(Sender(self._told(transfer.target))) as sender,
        ):
            sender.send(file, role)

    def _fill(self, places: State | Callable[[Manifest], State], moment: Moment) -> Loaded:
        """Fill ``places`` from this node's files, and verify every byte."""
        seat = self._seat
        found: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        with closing(self._files.find(moment, None)) as shared, closing(self._files.find(moment, seat.rank)) as own:
            for file in (shared, own):
                described = file.read()
                assert described is not None
                meta: Mapping[str, Any] = described["about"]["meta"]
                found |= {name: file.placed(parse_tensor(fields)) for name, fields in described["tensors"].items()}
                values |= {name: parse_value(fields) for name, fields in described["about"]["values"].items()}
            # Both parts are described like one checkpoint, so that the reader of checkpoints fills the state.
            manifest = Manifest(moment[1], seat.world_size, {}, meta, {}, found, values)
            loaded = fill_state(places, manifest, IN_MEMORY, seat.rank, seat.world_size)
        # The next write must not go to the files that hold what was loaded.
        self._files.keep(moment)
        return loaded
