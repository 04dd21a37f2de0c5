"""The type of the fixture ``change_limits``, which changes limits of this process for one test."""

from collections.abc import Callable
from typing import TypeAlias

ChangeLimits: TypeAlias = Callable[..., object]
