"""Reads whole numbers from environment variables. Each keeps the name of its variable, which errors show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.base.errors import PlacementError, RequestError

Environ = Mapping[str, str]

#: No launcher sets a longer number, and Python refuses to convert very long ones.
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Number:
    """A number and where it came from. Errors and ``toolkit env`` show the source."""

    value: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


def number(environ: Environ, *names: str) -> Number | None:
    """Return the first of the variables ``names`` that is set, None if none is. Raises PlacementError for a text."""
    name = next((name for name in names if environ.get(name, "") != ""), None)
    if name is None:
        return None
    text = environ[name]
    if not _WHOLE_NUMBER.fullmatch(text):
        raise refusal(f"{name}={text[:80]!r} is not a number", "unset it, or start again with one launcher")
    return Number(int(text), name)


def required(environ: Environ, *names: str, because: Number, advice: str) -> Number:
    """Return the first of ``names`` that is set. Raises PlacementError if none is, although ``because`` is."""
    value = number(environ, *names)
    if value is None:
        raise refusal(f"{because} is set but {' / '.join(names)} is not", advice)
    return value


def whole_number(environ: Environ, name: str, default: int) -> int:
    """Return the number in a variable, ``default`` where it is unset or empty. Raises RequestError that names it."""
    text = environ.get(name) or str(default)
    if not _WHOLE_NUMBER.fullmatch(text):
        raise RequestError(f"{name}={text[:80]!r} is not a whole number; was it changed by hand? Unset it")
    return int(text)


_OF_COMPONENT = re.compile(r"(.+)_HET_GROUP_([0-9]+)")
#: Without a component's number they describe the first. 24.11 tells the others' only where they were asked for.
_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS", "SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_MEM", "SLURM_TRES")


def of_components(environ: Environ) -> list[Environ]:
    """Return the environment of each component of a heterogeneous job; that of any other job alone.

    A variable that describes one component has ``_HET_GROUP_N`` behind its name. Here it has the name that it has in
    other jobs. What describes the first component alone is left out of the others.
    """
    count = whole_number(environ, "SLURM_HET_SIZE", 1)
    own_id = environ.get("SLURM_JOB_ID")
    # They may be those of the job in which this one was submitted.
    if count == 1 or environ.get("SLURM_JOB_ID_HET_GROUP_0", own_id) != own_id:
        return [environ]
    own: list[dict[str, str]] = [{} for _ in range(count)]
    first = dict(environ)
    for name, value in environ.items():
        match = _OF_COMPONENT.fullmatch(name)
        if match is not None and int(match[2]) < count:
            own[int(match[2])][match[1]] = value
            first.pop(name)
    sizes = {name for each in own for name in each}
    common = {name: value for name, value in first.items() if name not in sizes and not name.startswith(_SIZES)}
    return [first | own[0], *(common | each for each in own[1:])]


def refusal(problem: str, advice: str) -> PlacementError:
    """Return the error to raise, with the problem and what to do."""
    return PlacementError(f"cannot tell which rank this is: {problem}. What to do: {advice}.")
