"""A log that grows while it is read. Its lines are shown as a terminal shows them at last."""

from __future__ import annotations

import codecs
import io
import re
from pathlib import Path

from toolkit.base import reading
from toolkit.base.log_text import as_drawn
from toolkit.files.rundir import RunDir

#: A log is read in such pieces, so that one of many GiB needs no memory.
READ_BYTES = 1 << 20
#: A progress bar is written so often where it cannot be drawn in place.
BAR_S = 10.0
#: A line below, after which the cursor goes back up: a bar below another one.
_BELOW = re.compile(r"\n([^\n]*?)\x1b\[A")


class GrowingLog:
    """The log of ``rank``, or of the supervisor. Without an ``attempt`` it is the newest attempt's at any time."""

    def __init__(self, run: RunDir, rank: int | None, attempt: int | None = None) -> None:
        self._run, self._rank, self._moves_on = run, rank, attempt is None and rank is not None
        self._attempt = attempt or self._newest()
        self._begin()

    def _begin(self, at: int = 0) -> None:
        self._at = at
        self._rest = ""  #: a line that is not ended yet
        # While a log grows, the last character may be half written: the decoder keeps its bytes for the next read.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def position(self) -> tuple[Path, int]:
        """Return how far the log is read."""
        return self.path, self._at

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
        """Return the next lines. Empty where none has ended since, or there is no log yet.

        The last line of an attempt's log ends with it.
        """
        data = self._read()
        ended = ""
        if not data and self._moves_on and (newest := self._newest()) > self._attempt:
            ended, self._attempt = self.end(), newest
            ended += "\n" if ended else ""
            self._begin()
            data = self._read()
        text = self._rest + self._decoder.decode(data)
        while (above := _BELOW.sub("\r\\1\r", text)) != text:
            text = above
        lines, newline, rest = text.rpartition("\n")
        # Of a bar that is drawn for hours only what is seen of it is kept.
        self._rest = rest if len(rest) < READ_BYTES else as_drawn(rest)
        return ended + "".join(f"{as_drawn(line)}\n" for line in lines.split("\n") if newline)

    @property
    def drawn(self) -> str:
        """Return what is seen of a line that is not ended yet, such as a progress bar."""
        return as_drawn(self._rest)

    def end(self) -> str:
        """Return the last line, where nothing has ended it."""
        return as_drawn(self._rest + self._decoder.decode(b"", final=True))

    def _read(self) -> bytes:
        try:
            with reading.open_file(self.path) as file:
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data
