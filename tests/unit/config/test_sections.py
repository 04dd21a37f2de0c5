"""A section says by itself what its keys may be: no table elsewhere names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import check_section
from toolkit.limits import PATH, OneOf, Range, Where


@dataclass
class Inner:
    depth: Annotated[int, Range(1, 9)] = 2
    limit: Annotated[float, Range(0, 1), Where(lambda limit: limit != 1, "1 is no limit")] | None = None


@dataclass
class Outer:
    mode: Annotated[str, OneOf("wide", "deep")] = "wide"
    folders: Annotated[list[str], PATH] = field(default_factory=list)
    label: str = "a"
    inner: Inner = field(default_factory=Inner)

    def check(self) -> None:
        if self.mode == "deep" and self.inner.depth < 3:
            raise ConfigError("own.mode: deep needs own.inner.depth 3")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (Outer(mode="depp"), "own.mode: there is no 'depp'; did you mean 'deep'? valid: wide, deep"),
        (Outer(folders=["/a", ""]), "own.folders[1]: '' is empty"),
        (Outer(label="a\nb"), "own.label: 'a\\nb' is empty or holds a line break"),
        (Outer(inner=Inner(depth=0)), "own.inner.depth: 0 is refused; it must be a number of 1 or more, 9 at most"),
        (Outer(inner=Inner(limit=2)), "own.inner.limit: 2 is refused"),
        (Outer(inner=Inner(limit=1)), "own.inner.limit: 1 is no limit"),
        (Outer(mode="deep"), "own.mode: deep needs own.inner.depth 3"),
        (Outer(mode="deep", inner=Inner(depth=0)), "own.inner.depth: 0 is refused"),  # its keys first
    ],
)
def test_what_a_section_does_not_allow_is_refused_by_the_name_of_its_key(section: Outer, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_section(section, "own.")
    assert str(caught.value).startswith(says)


def test_the_defaults_and_the_bounds_themselves_pass() -> None:
    check_section(Outer(), "own.")
    check_section(Outer("deep", ["~/x"], inner=Inner(9, 0.0)), "own.")
