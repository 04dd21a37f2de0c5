"""All that a rank may have besides its loop, each part by an import where it is made.

What carries out a key of the config raises what it raises. The rest only watches or advises, and cannot end a rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from toolkit.base import fsio, trust
from toolkit.base.best_effort import best_effort_part
from toolkit.checkpoint.exchange import note_busy
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.data.loader import Batches
from toolkit.files.rundir import TRACE_VARIABLE
from toolkit.metrics.goodput import TimeBreakdown
from toolkit.ranks.session import Session
from toolkit.strategies.protocol import Strategy

if TYPE_CHECKING:
    from toolkit.data.bad_samples import BadSampleList
    from toolkit.plugins.memory.checkpoint_mirror import CheckpointMirror
    from toolkit.plugins.memory.copies import MemoryCopies
    from toolkit.plugins.methods.balance import Balance
    from toolkit.plugins.report.stragglers import History, StragglerDetector
    from toolkit.train.profile import RequestedProfiles
    from toolkit.train.saver import TrainingState
    from toolkit.train.step_digests import StepDigests

# -------------------------------------------------------------------------------------------- what a key asks for


def share_balance(loader: Batches, strategy: Strategy, ranks: int, accumulate: int) -> Balance | None:
    """Return what ``data.balance: auto`` asks for."""
    if not loader.balances or ranks == 1:
        return None
    from toolkit.plugins.methods.balance import build_balance

    return build_balance(loader, strategy.share, ranks, accumulate)


def bad_sample_list(loader: Batches, session: Session) -> BadSampleList | None:
    """Return what ``data.bad_samples: skip`` asks for."""
    if loader.max_bad_samples is None:
        return None
    from toolkit.data.bad_samples import BadSampleList

    return BadSampleList(session, loader.max_bad_samples)


def copies_in_memory(every: int | str | None, session: Session, state: TrainingState) -> MemoryCopies | None:
    """Return what ``checkpoint.memory_every_steps`` asks for: copies that are newer than what is on disk."""
    if every is None:
        return None
    from toolkit.plugins.memory.copies import MemoryCopies

    return MemoryCopies(every, session, state)


def checkpoint_mirror(place: str | None, session: Session, checkpoints: CheckpointFolder) -> CheckpointMirror | None:
    """Return what ``checkpoint.copy_to`` asks for, on rank 0: copies of what is committed, for which no step waits."""
    if place is None or not session.is_main:
        return None
    from toolkit.plugins.memory.checkpoint_mirror import CheckpointMirror

    def note_progress() -> None:
        session.activity.note_progress()
        note_busy(session.store, session.rank)  # the other ranks wait for what is copied back

    folder = trust.own_part(fsio.expand(place)) / session.run_dir.parent.name / session.run_dir.name / "checkpoints"
    return CheckpointMirror(folder, checkpoints.keep, note_progress, session.owns_run)


def step_digests(session: Session) -> StepDigests | None:
    """Return what records each step of this rank, for `toolkit resume-check`."""
    if TRACE_VARIABLE not in os.environ:
        return None
    from toolkit.train.saver import resume_environment
    from toolkit.train.step_digests import StepDigests

    return StepDigests(os.environ[TRACE_VARIABLE], session, resume_environment(session))


def profile_requests(session: Session) -> RequestedProfiles:
    """Return what carries out `toolkit profile`, between two steps."""
    from toolkit.train.profile import RequestedProfiles

    return RequestedProfiles(session)


# ---------------------------------------------------------------------------------------- what watches and advises


@best_effort_part
def straggler_detector(session: Session) -> StragglerDetector:
    """Return what compares the ranks' own times of a step."""
    from toolkit.plugins.report.stragglers import StragglerDetector

    return StragglerDetector(session)


@best_effort_part
def attempt_history(session: Session, first_step: int, breakdown: TimeBreakdown) -> History:
    """Return the figures of the run's attempts. Made at the first step."""
    from toolkit.plugins.report.stragglers import History

    return History(session, first_step, breakdown)
