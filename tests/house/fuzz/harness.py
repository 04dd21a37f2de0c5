"""Run a check on many inputs and count the outcomes."""

import io
import logging
import os
import secrets
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from toolkit.base.logs import LOGGER
from toolkit.cli import main as cli

CLEAR, NAMED, ACCEPTED = "clear errors", "named", "accepted"
#: The number of inputs in a unit run, and in the long one.
SAMPLE, MANY = 12, 500
#: Read before `seclude` removes the variable.
SEED = os.environ.get("TOOLKIT_FUZZ_SEED")
COUNTS = [pytest.param(SAMPLE, id="sample"), pytest.param(MANY, id="many", marks=pytest.mark.soak)]

ROOT = Path(__file__).parents[3]

Case = TypeVar("Case")


class SilentError(AssertionError):
    """An input that cannot have been meant was accepted without a word."""


def fuzz(what: str, cases: SearchStrategy[Case], check: Callable[[Case], str], count: int) -> None:
    """Call ``check`` with ``count`` of the cases; it returns CLEAR, NAMED or ACCEPTED.

    What it raises is collected by the place where it was raised. The test fails at the end, with an input for each.
    """
    number = secrets.randbits(32) if SEED is None else int(SEED)
    tally: Counter[str] = Counter()
    faults: dict[str, str] = {}

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def each(case: Case) -> None:
        try:
            tally[check(case)] += 1
        except Exception as error:
            tally["silent" if isinstance(error, SilentError) else "tracebacks"] += 1
            # one input for each place, since many inputs fail in the same one
            faults.setdefault(_place(error), f"{case!r:.2000}\n{''.join(traceback.format_exception(error)[-12:])}")

    each()
    counts = ", ".join(f"{tally[kind]} {kind}" for kind in (CLEAR, NAMED, ACCEPTED, "silent", "tracebacks"))
    report = f"{what}: {tally.total()} inputs (TOOLKIT_FUZZ_SEED={number}): {counts}"
    print(report)
    if faults:
        pytest.fail("\n\n".join([report, *faults.values()]), pytrace=False)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{frame.filename}:{frame.lineno}" for frame in frames if "/toolkit/" in frame.filename]
    return f"{type(error).__name__} {ours[-1] if ours else str(error)[:80]}"


@dataclass(frozen=True)
class Said:
    """The answer of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def command(argv: Sequence[str]) -> Said:
    """Run a command in this process. Only exit codes that are documented count."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    # what the command logs counts as its stderr
    LOGGER.handlers[:] = [handler]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(list(argv))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
        LOGGER.setLevel(before[1])
    said = Said(code, out.getvalue(), err.getvalue())
    assert code in (0, 1, 2, 75), f"{argv}: exit code {code}"
    assert "Traceback (most recent" not in said.err, said.err
    assert code != 2 or said.err.strip(), f"{argv}: exit code 2 without a word"
    return said


def seclude(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Move into a copy of the project, where no program is on the path.

    An odd input must never reach the machine's Slurm, nor make a folder in anybody's project.
    """
    for name in ("jobs", "configs"):
        shutil.copytree(ROOT / name, folder / "project" / name)
    monkeypatch.chdir(folder / "project")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PATH", str(folder / "none"))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TOOLKIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOOLKIT_RUNS", str(folder / "runs"))
    monkeypatch.setattr(sys, "argv", ["toolkit"])
    monkeypatch.setattr(cli, "build_parser", cache(cli.build_parser))  # it takes longer than most commands
