"""Ends a run with the script that has started it, where no ``with`` block does.

An uncaught exception, an exit with a code, and a script's last line are distinguished: only after the last two, with
code 0, is the run complete.
"""

from __future__ import annotations

import opcode
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeAlias

#: Ends a run, by the exception that has ended its script, if one has.
End: TypeAlias = Callable[[BaseException | None], None]


class UnseenExit(SystemExit):
    """An exit whose code is not seen: by ``raise SystemExit``, or by a ``sys.exit`` looked up before the run began."""


class ScriptEnd:
    """Calls ``end`` once, when the script of this process has ended."""

    def __init__(self, end: End) -> None:
        self._end: End | None = end
        self._pid = os.getpid()  # a fork that ends is no end of the script
        self._script = _frame_of_script()
        self._left_by: list[Any] = []  #: what was given to ``sys.exit()``
        self._exit, sys.exit = sys.exit, self._note_exit
        self._except_hook, sys.excepthook = sys.excepthook, self._note_error
        # Before threads are joined and no more can be started: a save may need one.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]

    def call(self, error: BaseException | None) -> None:
        """Call ``end``, unless that was done. Raises what it raises."""
        end = self.forget()
        if end is not None and os.getpid() == self._pid:
            end(error)

    def forget(self) -> End | None:
        """Leave the end to the caller, who has ended the run. Return None where that was done before."""
        end, self._end = self._end, None
        if sys.exit == self._note_exit:
            sys.exit = self._exit
        if sys.excepthook == self._note_error:
            sys.excepthook = self._except_hook
        return end

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._left_by.append(status)
        self._exit(status)

    def _note_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.call(error)
        except SystemExit:  # a stop; the interpreter ends with it
            raise
        except BaseException:
            traceback.print_exc()
        self._except_hook(kind, error, trace)

    def _at_exit(self) -> None:
        if self._end is None or os.getpid() != self._pid:
            return
        try:
            self.call(self._error())
            return
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        # The interpreter has its exit code by now, and it says that all is well.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def _error(self) -> SystemExit | None:
        """Return the exit that ended the script, where that was no good end."""
        if self._script is None or not _was_left(self._script):
            return None
        if self._left_by:
            return None if self._left_by[-1] in (None, 0) else SystemExit(self._left_by[-1])
        return UnseenExit()


#: That of this process, while its run is open.
_waiting: list[ScriptEnd] = []


def call_at_end(end: End) -> ScriptEnd:
    """Call ``end`` when the script ends."""
    _waiting[:] = [ScriptEnd(end)]
    return _waiting[0]


@contextmanager
def end_runs_on_exit() -> Iterator[None]:
    """End a run that the script within has started, before its exception is passed on."""
    try:
        yield
    except BaseException as error:
        for waiting in _waiting:
            waiting.call(None if is_good_exit(error) else error)
        raise
    for waiting in _waiting:
        waiting.call(None)


def is_good_exit(error: BaseException | None) -> bool:
    """True for the exit of a script that has done what it was to do."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _frame_of_script() -> FrameType | None:
    """Return the frame of the script's own lines, if the caller was called from there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def _was_left(frame: FrameType) -> bool:
    """True if an exception has left the frame, which has ended: its last instruction has raised it, or has called."""
    at = frame.f_lasti
    while opcode.opname[frame.f_code.co_code[at]] == "CACHE":  # of the call before it
        at -= 2
    last = opcode.opname[frame.f_code.co_code[at]]
    return "RAISE" in last or "CALL" in last
