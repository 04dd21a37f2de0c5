"""The gate: one stop step for all ranks, wherever and whenever a request comes."""

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.ranks.memory_store import MemoryStore
from tests.unit.ranks.simulation import case_of, faults, play
from tests.waiting import PATIENCE, wait_for
from toolkit.base.errors import ToolkitError
from toolkit.ranks import session
from toolkit.ranks.agreement import PREFIX, STOP, Gate, StalledRequest, Transport, propose

LIMIT_S = 10.0


class Watched(Gate):
    """A gate whose test can wait until the watcher has come somewhere, instead of sleeping."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.acknowledged = threading.Event()
        self.tidied = threading.Event()
        super().__init__(*args, **kwargs)

    def _acknowledge(self, *args: Any, **kwargs: Any) -> None:
        super()._acknowledge(*args, **kwargs)
        self.acknowledged.set()

    def _tidy(self, *args: Any, **kwargs: Any) -> None:
        super()._tidy(*args, **kwargs)
        self.tidied.set()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def gates(store: MemoryStore) -> Iterator[Callable[..., list[Watched]]]:
    """Yield a function that makes the gates of a few ranks. At the end they must close at once."""
    made: list[Watched] = []

    def make(count: int, **kwargs: Any) -> list[Watched]:
        made.extend(Watched(rank, count, lambda: store, **kwargs) for rank in range(count))
        return made

    yield make
    started = time.monotonic()
    for gate in made:
        gate.close()
    assert time.monotonic() - started < LIMIT_S / 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("toolkit-gate")]


def acknowledged(gates: list[Watched]) -> None:
    for gate in gates:
        assert gate.acknowledged.wait(LIMIT_S)
        gate.acknowledged.clear()


def decided(gates: list[Watched]) -> None:
    """Wait for the decision of all gates. A boundary without a decision would wait for ever."""
    assert all(gate._decided.wait(LIMIT_S) for gate in gates)


def agreed(gates: list[Watched]) -> None:
    acknowledged(gates)
    decided(gates)


def test_random_deliveries_neither_hang_nor_stop_ranks_on_different_steps() -> None:
    base = secrets.randbelow(10**9)
    print(f"seeds {base} to {base + 24}")
    for seed in range(base, base + 25):
        ranks = 8 + seed % 9
        case = case_of(seed, ranks)
        found = faults(case, play(case))
        assert not found, f"case_of({seed}, {ranks}) = {case}\n" + "\n".join(found)


class Promiseless(Gate):
    """A gate that acknowledges and continues starting steps."""

    def _await_decision(self, n: int) -> str | None:
        return super()._await_decision(n) if self._decided.is_set() else None


class ReadsFirst(Gate):
    """A gate that reads the step and then closes, instead of the other way round."""

    def _shut(self, *args: Any) -> None:
        self._read = self._started
        time.sleep(0.002)  # as long as a busy host may take a thread off its core
        super()._shut(*args)

    def _acknowledge(self, store: Transport, keys: Any, left: bool) -> None:
        now, self._started = self._started, self._started if left else self._read
        super()._acknowledge(store, keys, left)
        self._started = max(now, self._started)


@pytest.mark.parametrize("broken", [Promiseless, ReadsFirst])
def test_the_simulation_finds_what_breaks_without_the_promise_or_its_order(broken: type[Gate]) -> None:
    base = secrets.randbelow(10**9)
    print(f"seeds {base} to {base + 29}")
    cases = [case_of(seed, 8) for seed in range(base, base + 30)]
    assert any(faults(case, play(case, broken, wait_s=0.2)) for case in cases)


def test_an_open_gate_lets_every_step_through(gates: Callable[..., list[Watched]]) -> None:
    (gate,) = gates(1)
    assert [gate.boundary(n) for n in range(100)] == [None] * 100
    assert gate.pending is None


def test_ranks_stop_right_after_the_furthest_started_step(gates: Callable[..., list[Watched]]) -> None:
    three = gates(3)
    for gate, started in zip(three, (4, 6, 5), strict=True):
        gate.boundary(started)
    three[0].request(STOP)
    agreed(three)
    assert [gate.boundary(6) for gate in three] == [None] * 3
    assert [gate.boundary(7) for gate in three] == [STOP] * 3
    assert [gate.boundary(7) for gate in three] == [STOP] * 3  # there is no way on
    assert {gate.pending for gate in three} == {STOP}


def test_a_stop_before_the_first_step_of_a_resumed_run_lets_none_start(gates: Callable[..., list[Watched]]) -> None:
    two = gates(2)
    two[1].request(STOP)
    agreed(two)
    assert [gate.boundary(1000) for gate in two] == [STOP] * 2


def test_after_another_kind_the_same_boundary_asks_again(gates: Callable[..., list[Watched]]) -> None:
    two = gates(2)
    for gate in two:
        gate.boundary(3)
    two[0].request("save")
    agreed(two)
    assert [gate.boundary(4) for gate in two] == ["save"] * 2
    assert [gate.pending for gate in two] == [None] * 2
    two[1].request(STOP)  # while both save
    agreed(two)
    assert [gate.boundary(4) for gate in two] == [STOP] * 2


def test_different_kinds_at_once_come_one_after_the_other(gates: Callable[..., list[Watched]]) -> None:
    (gate,) = gates(1)
    gate.boundary(0)
    gate.request("save")
    gate.request(STOP)
    agreed([gate])
    assert gate.boundary(1) == "save"
    agreed([gate])
    assert gate.boundary(1) == STOP


def test_asking_twice_before_it_is_handed_out_is_asking_once(
    gates: Callable[..., list[Watched]], store: MemoryStore
) -> None:
    two = gates(2)
    for gate in (*two, *two):
        gate.request("save")
    agreed(two)
    assert [gate.boundary(0) for gate in two] == ["save"] * 2
    assert [gate.boundary(0) for gate in two] == [None] * 2
    for gate in two:
        assert gate.tidied.wait(LIMIT_S)
        gate.close()
    assert not store.exists(f"{PREFIX}/1/proposal")


def test_a_stop_from_outside_the_ranks_is_served_by_the_first_open_round(
    gates: Callable[..., list[Watched]], store: MemoryStore
) -> None:
    (gate,) = gates(1)
    gate.request("save")
    agreed([gate])
    assert gate.boundary(0) == "save"
    assert propose(store, 1, STOP, by="the supervisor") == 1
    assert propose(store, 1, STOP, by="the supervisor") == 1
    agreed([gate])
    assert gate.boundary(0) == STOP


@pytest.mark.parametrize("text", ["", "not JSON", "7", '["stop"]', '["stop", 7]', "[" * 100_000])
def test_a_strangers_word_on_the_gates_keys_ends_no_rank_and_stops_none(
    text: str, gates: Callable[..., list[Watched]], store: MemoryStore
) -> None:
    """The store takes any key from any process that reaches its port."""
    store.set({f"{PREFIX}/0/proposal": text or "-", f"{PREFIX}/0/call/1": text or "-"})
    both = gates(2)
    wait_for(lambda: not store.exists(f"{PREFIX}/0/call/1"), LIMIT_S, "the removal of what nobody of ours has said")
    assert [gate.boundary(0) for gate in both] == [None, None]
    propose(store, 2, STOP, by="the supervisor")
    assert all(gate.acknowledged.wait(LIMIT_S) for gate in both)
    assert [gate.boundary(1) for gate in both] == [STOP, STOP]


def test_a_closed_round_leaves_two_keys(gates: Callable[..., list[Watched]], store: MemoryStore) -> None:
    two = gates(2)
    two[0].request("save")
    agreed(two)
    assert [gate.boundary(0) for gate in two] == ["save"] * 2
    assert all(gate.tidied.wait(LIMIT_S) for gate in two)
    assert store.keys() == [f"{PREFIX}/0/decision", f"{PREFIX}/0/proposal"]


def test_nobody_waits_for_a_rank_that_has_left(gates: Callable[..., list[Watched]]) -> None:
    three = gates(3)
    for gate in three:
        gate.boundary(9)
    three[2].close()
    for kind in ("save", "rollback", STOP):  # the mark is carried from round to round
        three[0].request(kind)
        agreed(three[:2])
        assert [gate.boundary(10) for gate in three[:2]] == [kind] * 2


def test_the_last_one_to_acknowledge_may_be_one_that_leaves(
    gates: Callable[..., list[Watched]], store: MemoryStore
) -> None:
    two = gates(2)
    for gate in two:
        gate.boundary(5)
    call = store.claim(f"{PREFIX}/0/proposal", '["stop", "test"]')
    store.set({f"{PREFIX}/0/call/0": call})  # rank 1 is not called yet
    acknowledged(two[:1])
    two[1].close()
    decided(two[:1])
    assert two[0].boundary(6) == STOP


def test_a_decision_beyond_the_last_step_lets_all_complete(gates: Callable[..., list[Watched]]) -> None:
    two = gates(2)
    for gate in two:
        gate.boundary(9)  # the last of ten steps
    two[0].request(STOP)
    agreed(two)  # no rank asks again; the fixture closes


class Hangs:
    """Collects the calls of ``on_hang``."""

    def __init__(self) -> None:
        self.seen: list[StalledRequest] = []
        self._called = threading.Event()

    def __call__(self, hang: StalledRequest) -> None:
        self.seen.append(hang)
        self._called.set()

    def first(self) -> StalledRequest:
        assert self._called.wait(LIMIT_S)
        return self.seen[0]


def test_a_frozen_rank_is_named_before_the_exit_is_forced(store: MemoryStore) -> None:
    hangs = Hangs()
    ranks = [Watched(0, 3, lambda: store, force_after_s=0.3, on_hang=hangs), Watched(2, 3, lambda: store)]
    ranks[0].boundary(7)
    ranks[0].request(STOP)
    acknowledged(ranks)
    hang = hangs.first()
    assert (hang.kind, hang.step, hang.missing) == (STOP, None, (1,))
    assert hang.waited_s >= 0.3
    assert "ranks that have not acknowledged it: 1" in str(hang)
    for each in (Gate(1, 3, lambda: store), *ranks):  # it thaws, so all can leave
        each.close()


def test_a_rank_that_does_not_come_to_the_agreed_step_is_named(store: MemoryStore) -> None:
    hangs = Hangs()
    ranks = [Watched(0, 2, lambda: store), Watched(1, 2, lambda: store, force_after_s=0.3, on_hang=hangs)]
    ranks[0].boundary(3)
    ranks[0].request(STOP)
    agreed(ranks)
    assert ranks[0].boundary(4) == STOP  # rank 1 hangs in a step before
    hang = hangs.first()
    assert (hang.kind, hang.step, hang.missing) == (STOP, 4, (1,))
    assert "ranks that have not come to step 4: 1" in str(hang)
    for each in ranks:
        each.close()
    assert len(hangs.seen) == 1


def test_of_many_ranks_in_a_stop_that_hangs_one_asks_for_all_and_all_are_told() -> None:
    """Before, each rank asked for each: 8,000 ranks kept the store busy for 400 s."""

    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.asked = Counter[str]()

        def exists(self, key: str) -> bool:
            self.asked[key] += 1
            return super().exists(key)

    store, count = Counting(), 20
    hangs = [Hangs() for _ in range(count)]
    frozen = (3, 7)
    gates = {
        rank: Gate(rank, count, lambda: store, force_after_s=0.3, on_hang=hangs[rank])
        for rank in range(count)
        if rank not in frozen
    }
    gates[0].request(STOP)
    found = [hangs[rank].first() for rank in gates]
    assert {(hang.step, hang.missing, hang.more) for hang in found} == {(None, frozen, 0)}
    assert max(store.asked[f"{PREFIX}/0/ack/{rank}"] for rank in range(count)) == 1
    for gate in [*(Gate(rank, count, lambda: store) for rank in frozen), *gates.values()]:  # they thaw
        gate.close()


def test_a_hang_names_some_of_thousands() -> None:
    hang = StalledRequest(STOP, 120.0, None, (1, 2), more=7998)
    assert str(hang).endswith("ranks that have not acknowledged it: 1, 2 and 7998 more")


def test_what_was_handed_out_in_time_is_no_hang(store: MemoryStore) -> None:
    hangs = Hangs()
    gate = Watched(0, 1, lambda: store, force_after_s=0.2, on_hang=hangs)
    for n in range(3):
        gate.request("save")
        agreed([gate])
        assert gate.boundary(n) == "save"
    gate.request("never mind")  # for comparison: the clock runs
    assert hangs.first().kind == "never mind"
    gate.close()
    assert [hang.kind for hang in hangs.seen] == ["never mind"]


class Breaks(MemoryStore):
    """A store that is lost as soon as a rank proposes."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = threading.Event()

    def claim(self, key: str, value: str) -> str:
        self._lost.set()
        raise RuntimeError("connection reset by peer")

    def wait(self, key: str, timeout_s: float) -> bool:
        assert self._lost.wait(timeout_s)
        raise RuntimeError("connection reset by peer")

    def exists(self, key: str) -> bool:
        raise RuntimeError("connection reset by peer")


def test_a_lost_store_is_an_error_at_the_next_boundary_and_time_is_still_watched() -> None:
    store, hangs = Breaks(), Hangs()
    gate = Gate(0, 2, lambda: store, force_after_s=0.05, on_hang=hangs)
    gate.request(STOP)
    assert hangs.first().missing == ()
    assert "unknown (the store does not answer)" in str(hangs.first())
    with pytest.raises(ToolkitError, match=r"rank 0, step 5: .*connection reset by peer"):
        gate.boundary(5)
    gate.close()


def test_a_signal_handler_may_ask(gates: Callable[..., list[Watched]]) -> None:
    (gate,) = gates(1)
    before = signal.signal(signal.SIGUSR1, lambda *_: gate.request(STOP))
    try:
        gate.boundary(0)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        agreed([gate])
        assert gate.boundary(1) == STOP
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_gate_does_not_load_torch() -> None:
    code = "import sys, toolkit.ranks.agreement; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE * 30)


@pytest.mark.parametrize(("kind", "codes"), [("save", []), ("stop", [1])])
def test_only_a_stop_that_hangs_ends_the_process(kind: str, codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("toolkit.ranks.session.os._exit", ended.append)
    session._force_exit(StalledRequest(kind, 99.0, None, (1,)))
    assert ended == codes
