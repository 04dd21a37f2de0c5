"""The exception tree. Every message says what failed, where, and what to do.

ToolkitError
├── RequestError            the request was wrong; nothing was queued or changed (exit code 2)
│   ├── ConfigError         a key, a value or a combination of them
│   │   └── OnePassError    a model that is called again where the strategy makes one pass
│   ├── PlacementError      launch variables that contradict each other
│   ├── DataMissingError    a data set that is not where the config says
│   ├── RunNotFoundError    no run, or several, match a name
│   └── DamagedFileError    a file of a run does not hold what was written there
│       └── TornFileError   it is empty or cut off: a node died that was writing it
├── PluginError             a part that cannot be loaded (exit code 2)
├── SlurmError              a program of Slurm is missing, failed or did not answer
│   ├── SlurmRefusedError   the controller answered, and refused
│   └── MaybeQueuedError    whether Slurm has taken a job is not known
├── CheckpointError         a checkpoint cannot be written, or none of those present can be read
├── TrackerError            a tracker (mlflow, wandb, ...) is away, or refused what was sent
├── JobFailedError          the job ran and failed (exit code 1)
│   └── JobCodeError        the job's own code gave what cannot be used
└── StoppedError            the ranks stopped together, as asked (exit code 75)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from toolkit.base.terminal import visible

#: Longer texts of errors are shortened where they are written. One may hold a whole tensor, or a model's keys.
MOST_CHARS = 16 << 10

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REQUEST = 2
#: ``EX_TEMPFAIL`` of sysexits.h: stopped cleanly with a committed checkpoint, to be continued.
EXIT_STOPPED = 75


class ToolkitError(Exception):
    """Base of everything that this package raises for its users."""

    exit_code = EXIT_FAILED
    #: True if another try of the same, unchanged, would raise it again.
    comes_again = False

    def __str__(self) -> str:
        # A caller's own traceback shows it, past every guard of ours.
        return visible(super().__str__())


class RequestError(ToolkitError):
    """The request cannot be carried out as it stands; nothing was queued or changed."""

    exit_code = EXIT_REQUEST
    comes_again = True


class ConfigError(RequestError):
    """A config key, value or combination is wrong::

    >>> toolkit.load_config(None, ["train.epoch=3"])
    Traceback (most recent call last):
    toolkit.base.errors.ConfigError: train.epoch: unknown key; did you mean 'train.epochs'...
    """


class ExtraForwardError(ConfigError):
    """A job calls the model again for a batch, but its strategy makes one pass."""


class PlacementError(RequestError):
    """The launcher's environment variables contradict each other."""


class DataMissingError(RequestError):
    """A data set is not where the config says."""


class RunNotFoundError(RequestError):
    """No run, or more than one, matches the name given. ``sweep`` is the sweep that it names instead."""

    def __init__(self, message: str, sweep: str | None = None) -> None:
        super().__init__(message)
        self.sweep = sweep


class RunLockedError(RequestError):
    """Another process is submitting the run at this moment, or sends it to a tracker."""


class DamagedFileError(RequestError):
    """A file does not hold what the toolkit writes there. The message names the file and the key."""


class TornFileError(DamagedFileError):
    """A file is empty or cut off. A node died that was writing it, without flushing it to disk."""


class PluginError(ToolkitError):
    """A part cannot be loaded, of this or another package. Another node may have it whole, or what it needs."""

    exit_code = EXIT_REQUEST


class SlurmError(ToolkitError):
    """A program of Slurm is missing, failed, or did not answer in time."""


class SlurmRefusedError(SlurmError):
    """A program of Slurm reached the controller, which refused: asking again will not help."""


class MaybeQueuedError(SlurmError):
    """Whether Slurm has taken a job is not known: sbatch has not said so, and the queue does not say either."""


class SubmissionRefusedError(SlurmRefusedError):
    """Slurm does not take a job: the request was wrong, and nothing is queued."""

    exit_code = EXIT_REQUEST


class CheckpointError(ToolkitError):
    """A checkpoint cannot be written, or none of those present can be read."""


class UnsavableStateError(CheckpointError):
    """The state is such that no later save succeeds either.

    Ranks hold different values where they must be equal, or a value is of a kind that a checkpoint cannot hold.
    """


class SaveGivenUpError(CheckpointError):
    """A stop has given up a save, on this rank or another one, because it saves a later step."""


class TrackerError(ToolkitError):
    """A tracker of experiments did not answer, or refused what was sent. The next sync sends what is missing."""


class JobFailedError(ToolkitError):
    """The job ran and failed."""


class JobCodeError(JobFailedError):
    """The job's own code gave what cannot be used, such as a loss that is no number."""

    comes_again = True


class NotFiniteError(JobCodeError):
    """The loss or the weights are no finite numbers any more. The same steps would follow again."""


class StoppedError(ToolkitError):
    """All ranks stopped at the same step as agreed, or none was started. The run is to be continued as it is saved."""

    exit_code = EXIT_STOPPED


def listing(items: Sequence[str], most: int = 10) -> str:
    """Return the items, or the first ``most`` of them and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def shortened(text: str, most_chars: int = MOST_CHARS) -> str:
    """Return ``text``, of a long one the beginning and the end."""
    if len(text) <= most_chars:
        return text
    half = most_chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[-half:]}"


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` for the closest of ``valid`` to ``word``, or an empty string."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
