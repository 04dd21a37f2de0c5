"""Whole runs in miniature: ranks are threads around an in-memory store.

They run in lock step, as collectives keep ranks. A case follows from its seed: how many steps, how far the host runs
ahead of the device, which ranks are slow, where evaluations fall, and what is requested where. Only the interleaving of
the threads does not.
"""

import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.unit.ranks.memory_store import MemoryStore
from toolkit.ranks.agreement import STOP, Gate, StalledRequest, propose

Where = Literal["before", "step", "evaluation", "end", "outside"]
ENDLESS = 1_000_000


class Stuck(Exception):
    """A collective that not all ranks entered."""


@dataclass(frozen=True)
class Delivery:
    """A request ``kind`` on ``rank``, made ``times`` over.

    It comes before the first step, in a step, in an evaluation, or after the last step.
    """

    kind: str
    rank: int
    where: Where
    step: int
    times: int


@dataclass(frozen=True)
class Case:
    """The events of one run."""

    seed: int
    ranks: int
    first: int
    steps: int  # ENDLESS: only a stop ends it
    ahead: int  # steps that the host enqueues before it waits for the device
    evaluate_every: int
    delays_s: tuple[float, ...]  # at most, by rank: before each call of the store and in each step
    deliveries: tuple[Delivery, ...]

    @property
    def end(self) -> int:
        return self.first + self.steps


@dataclass
class Story:
    """The record of one rank: the steps it started. ``handed_out`` has each kind with the step at which it came."""

    handed_out: list[tuple[str, int]] = field(default_factory=list)
    last_started: int | None = None
    error: str | None = None


def case_of(seed: int, ranks: int) -> Case:
    rng = random.Random(seed)
    first = rng.choice([0, 0, 1000])
    endless = rng.random() < 0.5
    steps = ENDLESS if endless else rng.randint(1, 12)
    delays_s = [rng.choice([0.0, 0.0002]) for _ in range(ranks)]
    delays_s[rng.randrange(ranks)] = rng.choice([0.0, 0.003])
    kinds = rng.choice([(STOP,), (STOP,), ("save", STOP), ("save", "rollback"), ("save",)])
    if endless:
        kinds = (*kinds, STOP)
    deliveries = tuple(d for kind in kinds for d in _deliveries(rng, kind, ranks, first, min(steps, 6), endless))
    return Case(seed, ranks, first, steps, rng.randint(1, 4), rng.randint(1, 4), tuple(delays_s), deliveries)


def _deliveries(rng: random.Random, kind: str, ranks: int, first: int, steps: int, endless: bool) -> Iterator[Delivery]:
    """Yield requests of one kind, on one rank, a few or all. They come at one place or several, once or more often."""
    places: list[Where] = ["before", "step", "step", "evaluation", "outside"]
    places += [] if endless else ["end"]
    where, step = rng.choice(places), first + rng.choice([0, rng.randrange(steps), steps - 1])
    for rank in rng.sample(range(ranks), rng.choice([1, 1, 2, ranks])):
        if rng.random() < 0.2:
            where, step = rng.choice(places), first + rng.randrange(steps)
        yield Delivery(kind, rank, where, step, rng.choice([1, 1, 2]))


class Lockstep:
    """The collectives of the ranks.

    A rank gets ``ahead`` steps further than the slowest, and evaluations wait for all ranks.
    """

    def __init__(self, ranks: int, wait_s: float) -> None:
        self._ranks, self._patience_s = ranks, wait_s
        self._lock = threading.Lock()
        self._entered: defaultdict[object, int] = defaultdict(int)
        self._complete: defaultdict[object, threading.Event] = defaultdict(threading.Event)

    def enter(self, what: object) -> None:
        with self._lock:
            self._entered[what] += 1
            event = self._complete[what]
            if self._entered[what] == self._ranks:
                event.set()

    def wait(self, what: object) -> None:
        with self._lock:
            event = self._complete[what]
        if not event.wait(self._patience_s):
            raise Stuck(f"{what}: {self._entered[what]} of {self._ranks} ranks")


class Slow:
    """A client of the store whose calls take up to ``delay_s``."""

    def __init__(self, store: MemoryStore, delay_s: float, rng: random.Random) -> None:
        self._store, self._delay_s, self._rng = store, delay_s, rng

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(self._rng.random() * self._delay_s)
            return getattr(self._store, name)(*args)

        return call


class Rank:
    """One rank's loop, as the trainer's: boundary, step, sometimes an evaluation. At the end the gate is closed."""

    def __init__(self, case: Case, rank: int, store: MemoryStore, mesh: Lockstep, gate: type[Gate]) -> None:
        self.story = Story()
        self._case, self._rank, self._store, self._mesh = case, rank, store, mesh
        self._rng = random.Random(case.seed * 1000 + rank)
        self._delay_s = case.delays_s[rank]
        self._gate_class = gate

    def run(self) -> None:
        self._gate = self._gate_class(self._rank, self._case.ranks, self._connect, force_after_s=60, on_hang=self._hung)
        try:
            self._train()
        except Stuck as error:
            self.story.error = str(error)
        self._gate.close()

    def _connect(self) -> Any:
        return Slow(self._store, self._delay_s, self._rng) if self._delay_s else self._store

    def _hung(self, hang: StalledRequest) -> None:
        self.story.error = str(hang)

    def _train(self) -> None:
        case = self._case
        self._deliver("before")
        for n in range(case.first, case.end):
            if self._stops(n):
                return
            self._step(n)
            if (n + 1) % case.evaluate_every == 0:
                self._evaluate(n)
        self._deliver("end")

    def _stops(self, n: int) -> bool:
        while (kind := self._gate.boundary(n)) is not None:
            self.story.handed_out.append((kind, n))
            if kind == STOP:
                return True
        return False

    def _step(self, n: int) -> None:
        self.story.last_started = n
        self._mesh.enter(n)
        time.sleep(self._rng.random() * self._delay_s)
        self._deliver("step", n)
        self._deliver("outside", n)
        if n - self._case.ahead >= self._case.first:
            self._mesh.wait(n - self._case.ahead)

    def _evaluate(self, n: int) -> None:
        self._deliver("evaluation", n)
        for _ in range(3):
            if self._gate.pending == STOP:  # cut short; the reduction is entered all the same
                break
            time.sleep(0.0002)
        self._mesh.enter(("evaluation", n))
        self._mesh.wait(("evaluation", n))

    def _deliver(self, where: Where, n: int | None = None) -> None:
        for delivery in self._case.deliveries:
            due = (
                n is None or delivery.step == n or (where == "evaluation" and self._first_evaluation(delivery.step, n))
            )
            if delivery.rank == self._rank and delivery.where == where and due:
                for _ in range(delivery.times):
                    self._ask(delivery)

    def _first_evaluation(self, step: int, n: int) -> bool:
        return step <= n < step + self._case.evaluate_every

    def _ask(self, delivery: Delivery) -> None:
        if delivery.where == "outside":
            propose(self._store, self._case.ranks, delivery.kind, by="the supervisor")
        else:
            self._gate.request(delivery.kind)


@contextmanager
def _frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def play(case: Case, gate: type[Gate] = Gate, wait_s: float = 30.0) -> list[Story]:
    """Run the case; return the ranks' stories.

    A rank that does not end within twice ``wait_s`` has that as its error.
    """
    store, mesh = MemoryStore(), Lockstep(case.ranks, wait_s)
    ranks = [Rank(case, rank, store, mesh, gate) for rank in range(case.ranks)]
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    with _frequent_switches():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * wait_s
        for rank, thread in zip(ranks, threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                rank.story.error = rank.story.error or "the rank never ended"
    return [rank.story for rank in ranks]


def faults(case: Case, stories: list[Story]) -> list[str]:
    """Return the faults in the stories. Empty when all ranks tell the same one."""
    found = [f"rank {rank}: {story.error}" for rank, story in enumerate(stories) if story.error]
    if len({(tuple(story.handed_out), story.last_started) for story in stories}) > 1:
        found.append(f"the ranks disagree: {[(story.handed_out, story.last_started) for story in stories]}")
    handed_out = stories[0].handed_out
    if case.steps == ENDLESS and handed_out[-1:] != [(STOP, (stories[0].last_started or 0) + 1)]:
        expected_first = stories[0].last_started is None and handed_out[-1:] == [(STOP, case.first)]
        found += [] if expected_first else [f"it did not end with a stop right after the last step: {handed_out}"]
    return found
