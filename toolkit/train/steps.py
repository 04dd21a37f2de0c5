"""What ``run.steps()`` returns: the batches of the steps still to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Steps:
    """Batches, to be gone through once, one for each step::

    >>> def epoch(run: toolkit.TrainingRun, loader: torch.utils.data.DataLoader) -> None:
    ...     for number, batch in run.steps(loader).enumerate():  # goes on after a resume within the epoch
    ...         rate = 0.1 * number / len(loader)
    """

    def __init__(self, batches: Iterator[Any], length: Callable[[], int | None], number: Callable[[], int]) -> None:
        """Take the ``batches``. In a step ``number()`` is its number within what ``length()`` counts."""
        self._batches, self._length, self._number = batches, length, number

    def __iter__(self) -> Iterator[Any]:
        return self._batches  # no call of ours between the loop and its next batch

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, or the ``total``, also after a resume within it.

        Progress bars and metric loggers divide by it. Raises TypeError where the loader has no length.
        """
        length = self._length()
        if length is None:
            raise TypeError("run.steps: this loader has no len()")
        return length

    def __bool__(self) -> bool:
        return True

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield each batch with its number within the epoch, or of the run where ``run.steps`` has a ``total``.

        After a resume the numbers go on, where Python's ``enumerate`` would begin at 0 again.
        """
        for batch in self._batches:
            number = start + self._number()
            yield number, batch
            del batch  # else it would stay in memory until the end
            yield from enumerate(self._batches, number + 1)  # C code: no call of ours in a step
