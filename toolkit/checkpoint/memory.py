"""Copies of the training state in the nodes' memory, for a restart inside the job.

A state has two kinds of parts: what all ranks have in common, and what each rank alone has. The first rank of each node
copies the common part into files that its node's agent holds (toolkit.nodes.agent.state_memory), and each rank its own
part. Then each rank sends its own part to its partner while the training goes on. The partner is the rank with the same
place on the next node. So one node may be lost, and every part of the newest step still exists.

Each part has two files, written in turn. The ranks meet between :meth:`Memory.wait` and :meth:`Memory.write`: before
any rank overwrites the older state, the newer one is complete on all ranks and all partners.

At the next start the ranks agree on a state and load it: see :mod:`toolkit.checkpoint.memory_load`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.base import logs, node_memory
from toolkit.base.errors import ToolkitError
from toolkit.checkpoint import page_locked
from toolkit.checkpoint.exchange import KeyValue
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.memory_file import MemoryFile
from toolkit.checkpoint.memory_links import Receiver, Role, Sender
from toolkit.checkpoint.memory_load import KEY, MemoryLoad
from toolkit.checkpoint.memory_parts import PartWriter, layout, split
from toolkit.checkpoint.memory_seat import RankFiles, Seat
from toolkit.checkpoint.reader import Loaded
from toolkit.ranks.state import Json, State
from toolkit.slurm import network

log = logs.get(__name__)


class Memory:
    """One rank's copies of the state: its own part and its partner's. A node's first rank also has the common part."""

    def __init__(self, seat: Seat, attempt: int, address: str | None = None) -> None:
        """Open the rank's files. Raises OSError.

        ``address`` is this node's on the ranks' network; None where all ranks are on one node.
        """
        self._seat, self._attempt, self._address = seat, attempt, address
        self.is_usable = bool(seat.files)  #: after :meth:`load`: True if all ranks have files
        self._files = RankFiles(seat)
        self._receiver: Receiver | None = None
        self._partner_told: Mapping[str, Any] | None = None
        self._sender: Sender | None = None
        self._completing: threading.Thread | None = None
        self._is_sealed = threading.Event()  #: set when the last state written is complete on this node
        self._is_closing = False
        self.background_s = 0.0  #: seconds until the last copy was complete, here and on the partner

    @staticmethod
    def of_this_rank(rank: int, world_size: int, attempt: int, environ: Mapping[str, str]) -> Memory:
        """Open the files that the agent holds for this rank. Without files, log a warning: then no rank uses any."""
        seat = Seat.of_environment(rank, world_size, environ)
        try:
            if seat.files:
                one_node = seat.local_world_size == world_size
                peer = environ.get("MASTER_ADDR", "127.0.0.1")
                return Memory(seat, attempt, None if one_node else network.rank_address(environ, peer))
            why = "no agent of the toolkit has started this rank"
        except (OSError, ToolkitError) as error:
            why = str(error)
        log.warning("%s is not used: %s", KEY, why)
        return Memory(dataclasses.replace(seat, files=()), attempt)

    # ------------------------------------------------------------------------------------------------------- writing

    def wait(self) -> float:
        """Wait until the last state written is complete, here and on the partner. Return the seconds."""
        started = time.monotonic()
        if self._completing is not None:
            self._completing.join()
        return time.monotonic() - started

    def shortage(self, state: State) -> str | None:
        """Return why copies of ``state`` do not fit into the node's memory, or None. Log their size if they fit."""
        (_, shared), (_, own) = (layout(part) for part in split(state))
        # Two files for each part, and two more for the partner's where there is a partner.
        copies = 4 if self._partner_told is not None else 2
        ranks = self._seat.local_world_size
        held = sum(512 * Path(path).stat().st_blocks for path in self._seat.files)
        needed, free = 2 * shared + copies * own * ranks - held, node_memory.available_bytes()
        if needed <= free:
            sizes = f"2 x {shared / 1e6:.1f} MB a node, {copies} x {own / 1e6:.1f} MB a rank"
            log.info("the state is kept in memory, too: %s", sizes)
            return None
        return (
            f"{KEY}: the copies of the state of {ranks} ranks take {needed / 1e9:.1f} GB more of this node's memory "
            f"(2 x {shared / 1e9:.1f} and {ranks} x {copies} x {own / 1e9:.1f}), and {free / 1e9:.1f} GB are free: "
            "raise cluster.mem_gb, or set it to null"
        )

    def write(self, step: int, state: State, meta: Mapping[str, Json]) -> float:
        """Copy ``state`` as it is after ``step`` steps. Return the seconds that went into allocating memory.

        Call it when all ranks have returned from :meth:`wait`. A thread computes the digests and makes the partner's
        copy while the training goes on.
        """
        shared, own = split(state)
        is_on_gpu = any(isinstance(entry.value, torch.Tensor) and entry.value.is_cuda for entry in state.values())
        about: dict[str, Json] = {
            "attempt": self._attempt,
            "step": step,
            "world_size": self._seat.world_size,
            "meta": dict(meta),
        }
        parts = [PartWriter(self._files.own, own, {**about, "of": self._seat.rank}, self._seat.rank)]
        # This rank's own part stays the last: the partner gets a copy of it.
        if self._files.shared is not None:
            parts.insert(0, PartWriter(self._files.shared, shared, {**about, "of": None}, self._seat.rank))
        # Allocating is timed apart: it happens only where a file must grow, and would make the copy look slow.
        started = time.monotonic()
        for part in parts:
            part.open(pinned=is_on_gpu)
        opened_s = time.monotonic() - started
        for part in parts:
            part.copy()
        # Copies from a GPU are only enqueued here; the thread waits for them.
        wait_for_copies = page_locked.enqueued() if is_on_gpu else None
        started = time.monotonic()
        self._is_sealed.clear()

        def complete() -> None:
            try:
                if wait_for_copies is not None:
                    wait_for_copies()
                for part in parts:
                    part.seal()
            finally:
                # :meth:`close` waits for this only: the partner may have died.
                self._is_sealed.set()
            self._send_to_partner(parts[-1].file, step)
            self.background_s = time.monotonic() - started

        self._completing = threading.Thread(target=complete, name=f"memory-{step}", daemon=True)
        self._completing.start()
        return opened_s

    def _send_to_partner(self, file: MemoryFile, step: int) -> None:
        if self._partner_told is None or self._is_closing:
            return
        try:
            if self._sender is None:
                self._sender = Sender(self._partner_told)
            self._sender.send(file, Role.PARTNER)
        except (OSError, EOFError) as error:
            # Lose the partner's copy, not the training.
            if not self._is_closing:
                log.warning("from step %d on another node has no copy of this rank's state: %s", step, error)
            self._partner_told = None

    def close(self) -> None:
        """Wait until the last state written is complete here. Do not wait for the partner, which may have died."""
        self._is_closing = True
        if self._completing is not None:
            self._is_sealed.wait()
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()

    # ------------------------------------------------------------------------------------------------------- reading

    def load(
        self, places: State | Callable[[Manifest], State], kv: KeyValue | None, newer_than: int | None
    ) -> Loaded | None:
        """Fill ``places`` with the newest state that the ranks' nodes hold.

        Its step must be above rank 0's ``newer_than``. Every rank calls it once, before it writes, and all return a
        state, or all None. Raises CorruptCheckpointError on all ranks where one found its copy damaged: what was filled
        by then must be filled again from a checkpoint. That step is not offered again.
        """
        loading = MemoryLoad(self._seat, self._files, self._attempt, kv)
        # Publish where others can send to, before anyone is asked to send.
        if self._address is not None and kv is not None:
            self._receiver = Receiver(self._address, self._files.place, self._files.take)
            loading.publish(self._receiver.told)
        try:
            return loading.load(places, newer_than or 0)
        finally:
            self.is_usable, self._partner_told = loading.is_usable, loading.partner_told
