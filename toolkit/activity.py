"""What a rank is doing at this moment, in three attributes that its training writes and its report thread reads."""

from __future__ import annotations

#: Phases as a reader sees them: "rank 13 on node07: waiting for data, 212 s".
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
    """Written by plain assignment, some 10 ns each and without a lock: several times in each step.

    The supervisor takes a change of any of the three for progress, and a rank at which none changes for half of
    ``dist.timeout_s`` for stuck once the same is true of every other rank. So whatever takes long and is neither a
    step nor known to end soon moves ``count``: for each batch of an evaluation, each piece of a checkpoint, each retry.
    """

    __slots__ = ("count", "phase", "step")

    def __init__(self) -> None:
        self.phase = SETTING_UP
        #: Steps done; None until the first one of this attempt has ended.
        self.step: int | None = None
        self.count = 0

    def move(self) -> None:
        """Say that something long goes on."""
        self.count += 1
