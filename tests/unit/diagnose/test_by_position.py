"""Lines of a witness, of batches of every shape, compared across numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.diagnose.resume_check import _by_position

PAIR = {"positions": [4, 5], "samples": [7, 8], "inputs": ["a", "b"], "targets": ["c", "d"]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (PAIR, {4: (7, "a", "c"), 5: (8, "b", "d")}),
        ({name: PAIR[name] for name in ("positions", "samples", "inputs")}, {4: (7, "a", None), 5: (8, "b", None)}),
        ({**PAIR, "inputs": ["packed"]}, {4: (7, None, "c"), 5: (8, None, "d")}),
        ({"samples": [], "inputs": ["x", "y", "z"]}, {}),
    ],
    ids=["pairs", "nested", "packed", "another loader"],
)
def test_a_batch_of_any_shape_is_compared_by_what_is_known_of_it(line: dict[str, Any], expected: object) -> None:
    assert _by_position({0: line}) == expected
