"""The places where ranks wait."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from toolkit.plugins.node_watch.stack_summary import WAITS


@pytest.mark.parametrize("place", WAITS)
def test_the_places_where_ranks_wait_are_where_they_are_said_to_be(place: str) -> None:
    module, _, function = place.partition(":")
    assert f"def {function}(" in Path(str(find_spec(module).origin)).read_text()
