"""What the toolkit writes to a terminal. Text of others is shown there, and never obeyed.

A log, an error or a host name may hold what a terminal takes for a command: it clears the screen, sets the title, types
for the user, or lets a line look like another one. :func:`visible` makes such characters readable. Everything that a
command prints passes it, since :func:`guarded` replaces the output streams, and :func:`console` is the only other way.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: Control characters but newline and tab, and characters that are not seen or change the order of others. The two
#: joiners and signs that some scripts are written with stay.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
#: Colours, as many programs write them into their logs. Without them the text says the same.
_COLOURS = re.compile("\x1b\\[[0-9;:]*m")
#: A word, or a command in backticks with its blanks, and what stands before it.
_UNBROKEN = re.compile(r"\s*(?:`[^`]*`|\S)+")
#: A line with such an indent is a command or a quotation. It stays whole, and a terminal copies it as one line.
_QUOTED = "    "


def say(text: str, file: TextIO | None = None) -> None:
    """Print sentences. On a terminal their lines are broken between words, and no command in them is broken."""
    stream = file or sys.stdout
    print(fitted(text, stream), file=stream, flush=True)


def fitted(text: str, stream: TextIO) -> str:
    """Return ``text`` as :func:`say` prints it on ``stream``. It is left as it is where that is no terminal."""
    return wrapped(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def wrapped(text: str, width: int) -> str:
    """Return ``text`` with lines of at most ``width`` characters, broken between words.

    A word or a command in backticks that is longer gets a line of its own, as does a command that would be broken.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith(_QUOTED):
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())] + "  "
        lines.append("")
        for piece in _UNBROKEN.findall(line):
            if lines[-1].strip() and len(lines[-1]) + len(piece) > width:
                lines.append(indent + piece.lstrip())
            else:
                lines[-1] += piece
    return "\n".join(lines)


def open_standard_files() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, as a daemon's are.

    Otherwise the next file that is opened would get such a number, and what is printed, or a child's output.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def visible(text: str) -> str:
    """Return ``text`` with control and direction characters as escapes such as ``\\x1b``. Colours are left out."""
    if text.isprintable():
        return text
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), _COLOURS.sub("", text))


class EscapingStream:
    """A text stream on which everything is visible. Apart from its writes it is the stream below, ``raw``.

    ``login``: the login node, for a laptop's user; the commands that they are advised to type are to run there.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw, self.login = raw, ""

    def shown(self, text: str) -> str:
        return visible(text.replace("`toolkit ", f"`toolkit --on {self.login} ") if self.login else text)

    def write(self, text: str) -> int:
        self.raw.write(self.shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Have all that is printed in here made visible, on stdout and on stderr."""
    with contextlib.redirect_stdout(_over(sys.stdout)), contextlib.redirect_stderr(_over(sys.stderr)):
        yield


def set_laptop_login(login: str) -> None:
    """Have what is printed be for a user who is on a laptop, and reaches this machine as ``login``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, EscapingStream):
            stream.login = login


def login_from_laptop() -> str:
    """Return the name by which a laptop reaches this machine (:func:`set_laptop_login`); "" for a user who is here."""
    return sys.stdout.login if isinstance(sys.stdout, EscapingStream) else ""


def user_path(path: Path) -> str:
    """Return ``path`` as this command's user reaches it: on a laptop as scp and rsync take it."""
    return shlex.quote(f"{login}:{path.absolute()}") if (login := login_from_laptop()) else str(path)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Leave the streams to a user's own code in here, which may draw a progress bar."""
    with contextlib.redirect_stdout(_below(sys.stdout)), contextlib.redirect_stderr(_below(sys.stderr)):
        yield


def _over(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, EscapingStream) else EscapingStream(stream)


def _below(stream: Any) -> Any:
    return stream.raw if isinstance(stream, EscapingStream) else stream


#: How a terminal is told to show a colour.
_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def paint(parts: Iterable[tuple[str, str]]) -> None:
    """Print texts to stdout, each in its colour: in none in a pipe, on a dumb terminal, or if NO_COLOR is set."""
    stream = _below(sys.stdout)
    is_plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    for text, colour in parts:
        seen = visible(text)
        stream.write(seen if is_plain or not colour else f"\x1b[{_CODES[colour]}m{seen}\x1b[0m")


class OneLine:
    """The last line on stdout, which is drawn anew in place. Into a pipe it is written every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._is_terminal = every_s, sys.stdout.isatty()
        self._shown, self._at = "", time.monotonic()

    def draw(self, text: str) -> None:
        """Show ``text`` in place of what was drawn before."""
        if text == self._shown or (not self._is_terminal and time.monotonic() < self._at + self._every_s):
            return
        self._shown, self._at = text, time.monotonic()
        if self._is_terminal:  # cut, as a line that is broken cannot be drawn over
            self._raw(f"\r\x1b[K{visible(text)[: shutil.get_terminal_size().columns - 1]}")
        else:
            print(text, flush=True)

    def print_above(self, text: str) -> None:
        """Write lines over what is drawn. Nothing is done for an empty text."""
        if text:
            if self._is_terminal and self._shown:
                self._raw("\r\x1b[K")
            self._shown = ""
            sys.stdout.write(text)
            sys.stdout.flush()

    def _raw(self, text: str) -> None:
        stream = _below(sys.stdout)
        stream.write(text)
        stream.flush()


def console(**options: Any) -> Console:
    """Return rich's console for stdout. It draws with control characters of its own, and the texts are visible."""
    from rich.console import Console
    from rich.segment import Segment

    stream = _over(sys.stdout)

    class EscapingConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else Segment(stream.shown(segment.text), segment.style)

    return EscapingConsole(file=_below(stream), **options)
