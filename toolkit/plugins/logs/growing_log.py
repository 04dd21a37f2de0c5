"""A log that grows while it is read."""

from __future__ import annotations

import codecs
import io
from pathlib import Path

from toolkit.files.rundir import RunDir

#: A log is read in such pieces, so that one of many GiB needs no memory.
READ_BYTES = 1 << 20


class GrowingLog:
    """The log of ``rank``, or of the supervisor. Without an ``attempt`` it is the newest attempt's at any time."""

    def __init__(self, run: RunDir, rank: int | None, attempt: int | None = None) -> None:
        self._run, self._rank, self._moves_on = run, rank, attempt is None and rank is not None
        self._attempt = attempt or self._newest()
        self._begin()

    def _begin(self, at: int = 0) -> None:
        self._at = at
        # While a log grows, the last character may be half written: the decoder keeps its bytes for the next read.
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    @property
    def path(self) -> Path:
        if self._rank is None:
            return self._run.logs / "supervisor.log"
        return self._run.rank_log(self._attempt, self._rank)

    def _newest(self) -> int:
        return max(self._run.attempts_with_logs(), default=1)

    def skip(self) -> None:
        """Go to the end of what is there."""
        if self.path.exists():
            self._begin(self.path.stat().st_size)

    def read(self) -> str:
        """Return the next piece, and what the half character at the end of an attempt's log stands for.

        Empty where nothing new is there, or no log yet.
        """
        data = self._read()
        rest = ""
        if not data and self._moves_on and (newest := self._newest()) > self._attempt:
            rest, self._attempt = self.end(), newest
            self._begin()
            data = self._read()
        return rest + self._decoder.decode(data)

    def end(self) -> str:
        """Return what is left of the last character."""
        return str(self._decoder.decode(b"", final=True))

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data
