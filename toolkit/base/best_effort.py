"""What only watches or advises must not end what it watches: its exceptions cost one line of a log each.

Only the places that make the parts of a process use it: :mod:`toolkit.run.supervise.supervisor_components`,
:mod:`toolkit.nodes.agent.agent_components` and :mod:`toolkit.train.rank_components`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from toolkit.base import logs

log = logs.get(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def best_effort(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function: an exception is logged in one line, and None is returned."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            log.error("%s has failed: %r", _words(function), error)
            return None

    return call


def best_effort_part(make: Callable[P, T | None]) -> Callable[P, T]:
    """Decorate a function that makes a part of the process, of which methods are called and nothing else.

    It is false, and its methods return None, where ``make`` returns None, and after the first exception of it or them.
    """

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        made = best_effort(make)(*args, **kwargs)
        return cast(T, _Part(_words(make), made))

    return call


class _Part:
    def __init__(self, name: str, part: object) -> None:
        self._name, self._part = name, part

    def __bool__(self) -> bool:
        return self._part is not None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return None if self._part is None else getattr(self._part, method)(*args, **kwargs)
            except Exception as error:
                log.error("%s has failed and is disabled: %r", self._name, error)
                self._part = None
                return None

        return call


def _words(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", " ")
