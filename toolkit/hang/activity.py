"""What a rank is doing now, in three attributes. Its training writes them, and its report thread reads them."""

from __future__ import annotations

#: Phases as the user reads them: "rank 13 on node07: waiting for data, 212 s".
SETTING_UP = "setting up"
PRIMING = "priming"
LOADING = "loading a checkpoint"
WAITING_FOR_DATA = "waiting for data"
IN_STEP = "in a step"
AT_BOUNDARY = "between two steps"
LOGGING = "reading the loss"
EVALUATING = "evaluating"
SAVING = "saving a checkpoint"
FINISHING = "finishing"
OWN_CODE = "in the loop's own code"


class Activity:
    """A rank's phase, step and count. A plain assignment writes each, in some 10 ns and without a lock.

    They are written several times in each step. For the supervisor a change of any of the three is progress. A rank of
    which none changes for half of ``dist.timeout_s`` counts as stuck once that is true of every other rank as well. So
    any long work that is neither a step nor known to end soon moves ``count``: for each batch of an evaluation, each
    piece of a checkpoint, each retry.
    """

    __slots__ = ("count", "phase", "step")

    def __init__(self) -> None:
        self.phase = SETTING_UP
        #: Steps done; None until the first one of this attempt has ended.
        self.step: int | None = None
        self.count = 0

    def note_progress(self) -> None:
        """Report that something long goes on."""
        self.count += 1
