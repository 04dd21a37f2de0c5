"""The places where ranks wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.hang import stack_digest


@pytest.mark.parametrize(("file", "function"), stack_digest._WAITS)
def test_the_places_where_ranks_wait_are_where_they_are_said_to_be(file: str, function: str) -> None:
    assert f"def {function}(" in (Path(stack_digest.__file__).parents[1] / file).read_text()
