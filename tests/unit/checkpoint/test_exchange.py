"""How often the ranks that wait in a save ask the store, and for how long."""

from __future__ import annotations

import json

import pytest

from toolkit.checkpoint import exchange
from toolkit.checkpoint.exchange import Exchange

WAIT_S = 60.0


class Store:
    """A store in which rank 0's answer appears after ``WAIT_S``; it counts the looks. The clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.now = 0.0
        monkeypatch.setattr(exchange, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.now >= WAIT_S

    def get(self, key: str) -> bytes:
        return json.dumps({"ok": True}).encode()

    def set(self, key: str, value: str) -> None:
        """Drop a report of the test's rank."""

    def delete_key(self, key: str) -> bool:
        raise AssertionError("it only listens")


def waited(monkeypatch: pytest.MonkeyPatch, ranks: int) -> Store:
    store = Store(monkeypatch)
    talk = Exchange(store, rank=1, world_size=ranks, topic="save", number=1, timeout_s=600.0)
    assert talk.listen() == {"ok": True}
    return store


@pytest.mark.parametrize("ranks", [8, 500, 8000, 80_000])
def test_all_ranks_that_wait_in_a_save_together_do_not_fill_the_store(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Before, each rank looked ten times a second. 5,500 waiting ranks kept the store's core busy."""
    store = waited(monkeypatch, ranks)
    looks_a_second = store.looks * ranks / WAIT_S
    assert looks_a_second < 25_000
    assert store.now - WAIT_S <= max(0.1, ranks / 5000)


def test_few_ranks_look_as_often_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    store = waited(monkeypatch, 8)
    assert 10 * WAIT_S < store.looks < 11 * WAIT_S


def test_a_rank_that_has_reported_waits_for_a_slow_rank_0_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it gave up after 20 minutes, and rank 0 then committed: the ranks disagreed about the save."""
    talk = Exchange(Store(monkeypatch), rank=1, world_size=2, topic="save", number=1, timeout_s=WAIT_S / 10)
    talk.report({})
    assert talk.listen() == {"ok": True}
