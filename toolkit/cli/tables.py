"""Tables that fit a terminal: a line a row, with the state in the colour of its meaning."""

from __future__ import annotations

import shutil
import unicodedata
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

from toolkit.base import terminal
from toolkit.files import rundir
from toolkit.files.run_files import state_word

#: What a state means, by its word: it works, it waits, it is done, or something is wrong.
_COLOURS = {
    **dict.fromkeys(("running", "starting", "stopping", "restarting"), "cyan"),
    **dict.fromkeys(("queued", "requeued", "warning"), "yellow"),
    **dict.fromkeys(("completed", "ok"), "green"),
    **dict.fromkeys(("failed", "lost", "unreadable", "unknown", "bad"), "red"),
}
_COLOURED = ("STATE", "VERDICT")
#: Columns are left out until those that stay have this much for a long text. Then the longest texts are cut.
_READABLE = 24
#: A note, in the last column, has this much before the first column is left out for it, and 8 less before each next.
_READABLE_NOTE = 64
_GAP = "  "


def add_wide(parser: ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="all columns, as long as they are")


def width(args: Namespace) -> int | None:
    """Return how wide a table may be: as the terminal, 80 without one, and None with ``--wide``."""
    return None if getattr(args, "wide", False) else shutil.get_terminal_size().columns


class Table:
    """Rows of texts below a head, in lines of at most ``width`` characters; without a width as long as they are.

    Where that is too little room, columns without any text go first, then those in ``drop``, then the ends of texts.
    With ``is_named`` those of the first column stay: they are names.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        width: int | None = None,
        drop: Sequence[str] = (),
        *,
        is_named: bool = False,
    ) -> None:
        columns = [[_one_line(text) for text in column] for column in zip(*rows, strict=True)]
        wants = [max(map(len, column)) if "".join(column).isascii() else max(map(_width, column)) for column in columns]
        kept = [*range(len(columns))]
        if width is not None:
            kept = [number for number in kept if any(columns[number][1:]) or len(rows) == 1] or kept
            for rank, name in enumerate(drop):
                most = [_READABLE] * (len(columns) - 1) + [max(_READABLE, _READABLE_NOTE - 8 * rank)]
                if sum(min(most[number], wants[number]) + len(_GAP) for number in kept) <= width + len(_GAP):
                    break
                kept = [number for number in kept if columns[number][0] != name]
        columns, wants = [columns[number] for number in kept], [wants[number] for number in kept]
        widths = wants if width is None else _shares(wants, width, wants[0] if is_named else 0)
        #: True if something is left out or cut.
        self.is_truncated = len(kept) < len(rows[0]) or widths != wants
        cells = [[_padded(text, most) for text in column] for column, most in zip(columns, widths, strict=True)]
        #: The head and the rows, as plain text.
        self.lines = [_GAP.join(row).rstrip() for row in zip(*cells, strict=True)]
        at = next((number for number, column in enumerate(columns) if column[0] in _COLOURED), None)
        self._states = [""] * len(self.lines) if at is None else columns[at]
        self._begin = 0 if at is None else sum(widths[:at]) + len(_GAP) * at
        self._end = 0 if at is None else self._begin + widths[at]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def parts(self, number: int) -> Iterator[tuple[str, str]]:
        """Yield the parts of a line, each with its colour; the head is line 0."""
        line, colour = self.lines[number], _COLOURS.get(state_word(self._states[number]), "")
        # Wide characters before the state would move it: such a line stays plain.
        if not colour or len(line) != _width(line):
            yield line, "bold" * (number == 0)
            return
        yield line[: self._begin], ""
        yield line[self._begin : self._end], colour
        yield line[self._end :], ""

    def print(self) -> None:
        for number in range(len(self.lines)):
            terminal.paint([*self.parts(number), ("\n", "")])


def short(run: str) -> str:
    """Return the last eight digits of a run's id, which name it as well; any other text as it is."""
    return run[-8:] if rundir.is_run_id(run) else run


def _one_line(text: str) -> str:
    # A reason may have several lines, and a terminal shows some characters as escapes.
    return text if text.isprintable() and "  " not in text else terminal.visible(" ".join(text.split()))


def _shares(widths: Sequence[int], width: int, first: int) -> list[int]:
    """Return how wide the columns may be, the first one at least ``first``. The widest gives way first."""
    left, most = width - len(_GAP) * (len(widths) - 1), max(widths)
    shares = [*widths]
    while sum(shares) > left and most > 4:
        most -= 1
        shares = [max(first, min(widths[0], most)), *(min(each, most) for each in widths[1:])]
    return shares


def _width(text: str) -> int:
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(mark) in "WF") for mark in text)


def _padded(text: str, width: int) -> str:
    if len(text) <= width and text.isascii():  # as most are
        return text.ljust(width)
    if (has := _width(text)) > width:
        while _width(text) > width - 3:
            text = text[:-1]
        if text.count("`") % 2 and "; " in text:  # half a command helps nobody
            text = text[: text.rindex("; ") + 2]
        text, has = f"{text}...", _width(text) + 3
    return text + " " * (width - has)
