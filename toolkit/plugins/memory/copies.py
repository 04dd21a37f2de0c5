"""Copies of the training state in the nodes' memory, for a restart inside the job.

The first rank of each node copies what all ranks have in common into files that its node's agent holds
(toolkit.nodes.agent.state_memory), and each rank its own part. While the training continues, each rank sends its own
part to its partner, the rank with the same place on the next node. So one node may be lost.

Each part has two files, written in turn. The ranks meet between :meth:`PeerMemory.wait` and ``write``: before
any rank overwrites the older state, the newer one is complete on all ranks and all partners.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.base import logs, this_node
from toolkit.base.errors import ConfigError, ToolkitError
from toolkit.checkpoint.exchange import KeyValueStore
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.reader import Loaded
from toolkit.devices import page_locked
from toolkit.plugins.memory.files import MemoryFile, MemorySlot, PartWriter, RankFiles, Role, layout, split
from toolkit.plugins.memory.load import KEY, MemoryLoad, Receiver, Sender
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json, State
from toolkit.slurm import network
from toolkit.train.saver import MAX_OVERHEAD, TrainingState

log = logs.get(__name__)


class MemoryCopies:
    """One rank's copies of the state in memory (:class:`PeerMemory`), every ``every`` steps."""

    def __init__(self, every: int | str, session: Session, state: TrainingState) -> None:
        self._session, self._state = session, state
        self._clock: CopyClock | None = CopyClock(every)  #: None: nothing is copied any more
        self._memory = PeerMemory.from_environment(session.rank, session.world_size, session.attempt, os.environ)
        self._is_sure_of_room = False

    def load(self, newest_on_disk: Callable[[], int | None]) -> Loaded | None:
        """Load the copy kept before a restart inside the job; None if none is newer than what rank 0 finds on disk."""
        newer_than = newest_on_disk() if self._session.is_main else None
        return self._memory.load(self._state.places(), self._session.store, newer_than)

    def is_due(self, step: int) -> bool:
        """True if the state is to be copied after ``step`` steps."""
        return self._memory.is_usable and self._clock is not None and self._clock.is_due(step)

    def keep(self, step: int, reached: Mapping[str, Json], began_s: float) -> None:
        """Copy the state after ``step`` steps into the nodes' memory; every rank calls it.

        ``began_s``: when the training began to wait for the copy, by ``time.monotonic``. Where the copies do not fit it
        raises ConfigError; with ``auto`` it turns the copies off instead, on all ranks.
        """
        memory, clock = self._memory, self._clock
        assert clock is not None
        idle_s = memory.wait()
        state = self._state.now()
        shortage = None if self._is_sure_of_room else memory.shortage(state)
        if shortage is not None and not clock.is_auto:
            raise ConfigError(shortage)
        figures = clock.figures(step, began_s, memory.background_s)
        # Also a barrier: from here on the copy before this one is complete on all ranks and on their partners.
        sums = self._state.source.sum({**figures, "short": float(shortage is not None)})
        # One rank without room turns the copies off on all of them.
        if sums["short"]:
            log.warning("%s: auto is off: %s", KEY, shortage or "the copies do not fit into another node's memory")
            self._clock = None
            return
        self._is_sure_of_room = True
        every = clock.agree(step, sums)
        if every is not None and self._session.is_main:
            log.info("the state is kept in memory every %d steps from here on", every)
        # Waits for the copy before and for new memory are left out of the cost by which ``auto`` sets the interval.
        idle_s += memory.write(step, state, {**self._state.meta, **reached})
        now_s = time.monotonic()
        clock.copied(step, now_s - began_s - idle_s, now_s)

    def close(self) -> None:
        """Wait until the last copy is complete on this node."""
        self._memory.close()


def steps_between_copies(copy_s: float, background_s: float, step_s: float) -> int:
    """Return the steps from one copy in memory to the next.

    Copying takes at most 1 % of the time, and no copy begins before the last one is complete.
    """
    if step_s <= 0:
        return 1
    return max(1, math.ceil(copy_s / (MAX_OVERHEAD * step_s)), math.ceil(2 * background_s / step_s))


class CopyClock:
    """The steps at which the state is copied into memory: every N steps, or with ``auto`` as often as is cheap.

    The seconds of all ranks are added up at each copy, and from the sums each rank computes the same next step.
    """

    def __init__(self, every: int | str) -> None:
        self.is_auto = every == "auto"
        self._every = 1 if isinstance(every, str) else every
        self._next = 0  #: for auto: the step at which the next copy is due
        self._last_step: int | None = None
        self._last_s = self._copy_s = 0.0  #: when the last copy had been made, and how long the training waited for it

    def is_due(self, step: int) -> bool:
        """True if the state is to be copied after ``step`` steps."""
        return step >= self._next if self.is_auto else step % self._every == 0

    def figures(self, step: int, began_s: float, background_s: float) -> dict[str, float]:
        """Return figures for the ranks to add up; the last copy took ``background_s`` until it was complete."""
        steps = 0 if self._last_step is None else step - self._last_step
        step_s = (began_s - self._last_s) / steps if steps else 0.0
        return {"copy_s": self._copy_s, "background_s": background_s, "step_s": step_s}

    def agree(self, step: int, sums: Mapping[str, float]) -> int | None:
        """Set the next step from all ranks' sums. Return the new distance in steps if it has changed."""
        if not self.is_auto:
            return None
        before = self._every
        self._every = steps_between_copies(sums["copy_s"], sums["background_s"], sums["step_s"])
        self._next = step + self._every
        return self._every if self._every != before else None

    def copied(self, step: int, copy_s: float, now_s: float) -> None:
        """Record that the training waited ``copy_s`` for the copy of ``step``, until ``now_s``."""
        self._last_step, self._copy_s, self._last_s = step, copy_s, now_s


class PeerMemory:
    """One rank's copies of the state: its own part and its partner's. A node's first rank also has the common part."""

    def __init__(self, slot: MemorySlot, attempt: int, address: str | None = None) -> None:
        """Open the files. Raises OSError. ``address``: this node's for other nodes' ranks; None if there are none."""
        self._slot, self._attempt, self._address = slot, attempt, address
        self.is_usable = bool(slot.files)  #: after :meth:`load`: True if all ranks have files
        self._files = RankFiles(slot)
        self._receiver: Receiver | None = None
        self._partner_address: Mapping[str, Any] | None = None
        self._sender: Sender | None = None
        self._completing: threading.Thread | None = None
        self._is_sealed = threading.Event()  #: set when the last state written is complete on this node
        self._is_closing = False
        self.background_s = 0.0  #: seconds until the last copy was complete, here and on the partner

    @staticmethod
    def from_environment(rank: int, world_size: int, attempt: int, environ: Mapping[str, str]) -> PeerMemory:
        """Open the files that the agent holds for this rank. Without files, log a warning: then no rank uses any."""
        slot = MemorySlot.from_environment(rank, world_size, environ)
        try:
            if slot.files:
                one_node = slot.local_world_size == world_size
                peer = environ.get("MASTER_ADDR", "127.0.0.1")
                return PeerMemory(slot, attempt, None if one_node else network.rank_address(environ, peer))
            why = "no agent of the toolkit has started this rank"
        except (OSError, ToolkitError) as error:
            why = str(error)
        log.warning("%s is not used: %s", KEY, why)
        return PeerMemory(dataclasses.replace(slot, files=()), attempt)

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
        copies = 4 if self._partner_address is not None else 2
        ranks = self._slot.local_world_size
        held = sum(512 * Path(path).stat().st_blocks for path in self._slot.files)
        needed, free = 2 * shared + copies * own * ranks - held, this_node.available_memory_bytes()
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
        copy while the training continues.
        """
        shared, own = split(state)
        is_on_gpu = any(isinstance(entry.value, torch.Tensor) and not entry.value.is_cpu for entry in state.values())
        world_size = self._slot.world_size
        about: dict[str, Json] = {"attempt": self._attempt, "step": step, "world_size": world_size, "meta": dict(meta)}
        parts = [PartWriter(self._files.own, own, {**about, "of": self._slot.rank}, self._slot.rank)]
        # This rank's own part stays the last: the partner gets a copy of it.
        if self._files.shared is not None:
            parts.insert(0, PartWriter(self._files.shared, shared, {**about, "of": None}, self._slot.rank))
        # Allocating is timed apart: it happens only where a file must grow, and would make the copy look slow.
        started = time.monotonic()
        for part in parts:
            part.allocate(pinned=is_on_gpu)
        opened_s = time.monotonic() - started
        for part in parts:
            part.copy()
        # Copies from a GPU are only enqueued here; the thread waits for them.
        wait_for_copies = page_locked.stream_waiter() if is_on_gpu else lambda: None
        started = time.monotonic()
        self._is_sealed.clear()

        def complete() -> None:
            try:
                wait_for_copies()
                for part in parts:
                    part.seal()
            except Exception as error:  # the state of an earlier step is loaded instead
                log.error("the state after step %d is not complete in the node's memory: %r", step, error)
                return
            finally:
                # :meth:`close` waits for this only: the partner may have died.
                self._is_sealed.set()
            self._send_to_partner(parts[-1].file, step)
            self.background_s = time.monotonic() - started

        self._completing = threading.Thread(target=complete, name=f"memory-{step}", daemon=True)
        self._completing.start()
        return opened_s

    def _send_to_partner(self, file: MemoryFile, step: int) -> None:
        if self._partner_address is None or self._is_closing:
            return
        try:
            if self._sender is None:
                self._sender = Sender(self._partner_address)
            self._sender.send(file, Role.PARTNER)
        except (OSError, EOFError) as error:
            # Lose the partner's copy, not the training.
            if not self._is_closing:
                log.warning("from step %d on another node has no copy of this rank's state: %s", step, error)
            self._partner_address = None

    def close(self) -> None:
        """Wait until the last state written is complete here. Do not wait for the partner, which may have died."""
        self._is_closing = True
        if self._completing is not None:
            self._is_sealed.wait()
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()

    def load(
        self, places: State | Callable[[Manifest], State], kv: KeyValueStore | None, newer_than: int | None
    ) -> Loaded | None:
        """Fill ``places`` with the newest state that the ranks' nodes hold, above rank 0's ``newer_than``.

        Every rank calls it once, before it writes, and all return a state, or all None. Raises CorruptCheckpointError
        on all ranks where one found its copy damaged: what was filled by then must be filled again from a checkpoint.
        """
        loading = MemoryLoad(self._slot, self._files, self._attempt, kv)
        # Publish where others can send to, before anyone is asked to send.
        if self._address is not None and kv is not None:
            self._receiver = Receiver(self._address, self._files.receive_file, self._files.mark_received)
            loading.publish(self._receiver.address)
        try:
            return loading.load(places, newer_than or 0)
        finally:
            self.is_usable, self._partner_address = loading.is_usable, loading.partner_address
