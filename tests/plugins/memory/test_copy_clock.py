"""How often the state is copied into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from tests.unit.checkpoint.test_page_locked import Cuda, cuda  # noqa: F401
from toolkit.checkpoint.policy import MAX_OVERHEAD
from toolkit.plugins.memory.copies import CopyClock, steps_between_copies
from toolkit.plugins.memory.files import MemoryFile


def test_a_copy_in_memory_never_costs_more_than_its_share() -> None:
    for copy_s, step_s in ((0.5, 0.1), (0.003, 1.0), (2.0, 0.07)):
        steps = steps_between_copies(copy_s, 0.0, step_s)
        assert copy_s <= MAX_OVERHEAD * steps * step_s
        assert steps == 1 or copy_s > MAX_OVERHEAD * (steps - 1) * step_s


def test_a_copy_in_memory_waits_for_the_one_before() -> None:
    assert steps_between_copies(0.0, 5.0, 1.0) == 10


def test_a_copy_that_costs_nothing_is_made_after_each_step() -> None:
    assert steps_between_copies(0.0, 0.0, 1.0) == 1
    assert steps_between_copies(0.5, 0.5, 0.0) == 1  # nothing is known yet


def copies(clock: CopyClock, ranks: list[dict[str, float]], steps: int) -> list[int]:
    """Return the steps after which these ranks copy.

    One clock plays all of them: it gets the sums over their figures.
    """
    made, now_s = list[int](), 0.0
    for step in range(1, steps + 1):
        now_s += ranks[0]["step_s"]
        if not clock.is_due(step):
            continue
        first = clock.figures(step, now_s, ranks[0]["background_s"] if made else 0.0)
        others = [dict.fromkeys(first, 0.0) if not made else rank for rank in ranks[1:]]
        clock.agree(step, {name: first[name] + sum(rank[name] for rank in others) for name in first})
        now_s += ranks[0]["copy_s"]
        clock.copied(step, ranks[0]["copy_s"], now_s)
        made.append(step)
    return made


def test_auto_settles_after_two_copies() -> None:
    rank = {"copy_s": 0.095, "background_s": 2.0, "step_s": 1.0}
    assert copies(CopyClock("auto"), [rank], 40) == [1, 2, 12, 22, 32]


def test_auto_minds_the_other_ranks() -> None:
    rank = {"copy_s": 0.05, "background_s": 0.0, "step_s": 1.0}
    slower = {**rank, "copy_s": 0.14}
    assert copies(CopyClock("auto"), [rank, slower], 30) == [1, 2, 12, 22]


def test_a_number_of_steps_stays_what_it_is() -> None:
    rank = {"copy_s": 5.0, "background_s": 50.0, "step_s": 1.0}
    assert copies(CopyClock(4), [rank], 12) == [4, 8, 12]


def test_a_file_in_memory_that_grows_is_page_locked_anew(cuda: Cuda, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.touch()
    file = MemoryFile(str(path))
    file.open(mmap.PAGESIZE, pinned=True)
    file.open(3 * mmap.PAGESIZE, pinned=True)
    assert list(cuda.locked.values()) == [3 * mmap.PAGESIZE]
    assert cuda.holds(file.bytes_at(0, 3 * mmap.PAGESIZE))
    file.close()
