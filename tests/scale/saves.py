"""A save of a minute: how often all waiting ranks together ask the store."""

from collections.abc import Mapping

import pytest

from tests.scale import Curve
from tests.unit.checkpoint.test_ranks import WAIT_S, waited

LOOK_S = 15e-6


def wait(ranks: int) -> Mapping[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        store = waited(patch, ranks)
    looks = store.looks * ranks / WAIT_S
    late_s = store.now - WAIT_S
    return {
        "looks a second": round(looks),
        "% of the store": round(100 * looks * LOOK_S, 1),
        "late s": round(late_s, 2),
    }


CURVES = [Curve("waiting in a save", "ranks", (8, 1000, 8000, 80_000), wait)]
