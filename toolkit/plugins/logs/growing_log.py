"""A log that grows while it is read."""

from __future__ import annotations

import codecs
import io
from pathlib import Path

from toolkit.base import reading
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

    def skip(self, lines: int | None = 0) -> None:
        """Go to the last ``lines`` of what is there; None stays at the beginning."""
        if lines is None or not self.path.exists():
            return
        with reading.open_file(self.path) as file:
            at = file.seek(0, io.SEEK_END)
            # Search backwards, in pieces. The last byte only ends the last line.
            limit = at - 1
            while lines and limit > 0:
                begin = max(0, limit - READ_BYTES)
                file.seek(begin)
                piece = file.read(limit - begin)
                cut = len(piece)
                while lines and (cut := piece.rfind(b"\n", 0, cut)) >= 0:
                    lines -= 1
                at, limit = begin + cut + 1, begin
        self._begin(0 if lines else at)

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
            with reading.open_file(self.path) as file:
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data
