"""The type of the fixture ``change_limits``, which changes limits of this process for one test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

ChangeLimits: TypeAlias = Callable[..., object]
