"""Where metrics go: TensorBoard event files, and one JSON line per logged step. A resume duplicates nothing in either.

A run that is killed has logged steps after its last checkpoint, and its next attempt logs them again. Both sinks
therefore begin by dropping everything after the step that is resumed from: there is always one value per tag and step.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base import fsio, logs
from toolkit.base.process_limits import limits

if TYPE_CHECKING:
    import torch

    from toolkit.ranks.state import Json

log = logs.get(__name__)

#: Of figures of each rank. In a larger world they would fill the event file, and no screen could show them.
MOST_CURVES = 64
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10,})\..*")


class Sink:
    """A place for metrics. This one, that of all ranks but rank 0, does nothing and imports nothing."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log values by tag (`train/loss`, ...) at `step`. A second call at the same step adds other tags."""

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Log how often each value came, or values near it; `values` has the shape (n,) and any order.

        Those that are not finite are left out.
        """

    def hparams(self, values: Mapping[str, bool | int | float | str], metrics: Sequence[str] = ()) -> None:
        """Log the hyper-parameters, and the tags of the scalars that runs are compared by. Once, at the start."""

    def completed(self, step: int) -> None:
        """Mark the hyper-parameters as those of a run that has completed."""

    def text(self, tag: str, text: str, step: int = 0, *, markdown: bool = False) -> None:
        """Log a text, shown unchanged (a config, a command line), or rendered as Markdown."""

    def images(self, tag: str, images: torch.Tensor, step: int = 0) -> None:
        """Log a grid of images (N, C, H, W), with C of 1 or 3.

        They are uint8, or floats, whose own range is stretched to that of uint8.
        """

    def flush(self) -> None:
        """Put everything on disk. Call it before each commit, or a resume would miss what was logged up to it."""

    def close(self) -> None:
        """Flush and close the files."""


class FanOut(Sink):
    """Hands everything to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.scalars(step, values)

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        for sink in self._sinks:
            sink.histogram(step, tag, values)

    def hparams(self, values: Mapping[str, bool | int | float | str], metrics: Sequence[str] = ()) -> None:
        for sink in self._sinks:
            sink.hparams(values, metrics)

    def completed(self, step: int) -> None:
        for sink in self._sinks:
            sink.completed(step)

    def text(self, tag: str, text: str, step: int = 0, *, markdown: bool = False) -> None:
        for sink in self._sinks:
            sink.text(tag, text, step, markdown=markdown)

    def images(self, tag: str, images: torch.Tensor, step: int = 0) -> None:
        for sink in self._sinks:
            sink.images(tag, images, step)

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonlSink(Sink):
    """One line of JSON per logged step: `step`, `wall_time` (seconds since 1970) and the tags. NaN becomes null.

    Lines after `resumed_step` (all of them when it is None) are dropped at the start.
    """

    def __init__(self, path: Path, resumed_step: int | None, clock: Callable[[], float] = time.time) -> None:
        fsio.make_dir(path.parent, parents=0)
        # Cut the file at the resumed step, and read the last line back: a later call at its step adds to it.
        end = _end_of(path, resumed_step)
        self._file = fsio.PatientFile(path)
        self._file.truncate(end)
        last = _last_line(path)
        self._last: dict[str, Json] = fsio.nonfinite_to_none(json.loads(last)) if last else {}
        self._last_start = self._file.size - len(last)
        self._clock = clock

    def tags(self, step: int | None) -> Collection[str]:
        """Return the tags that the last line has, if it is that of `step`."""
        return [*self._last] if step is not None and self._last.get("step") == step else ()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line. Add to the last one if it has the same step (an evaluation after a logging step)."""
        self._append(step, fsio.nonfinite_to_none({tag: float(value) for tag, value in values.items()}))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Add to the same line how many values each bin has, under the middle of the bin. Empty ones are left out."""
        numbers, edges = _binned(values)
        counts = zip((edges[1:] + edges[:-1]) / 2, np.histogram(numbers, edges)[0].tolist(), strict=True)
        self._append(step, {tag: {f"{middle:.12g}": count for middle, count in counts if count}})

    def _append(self, step: int, found: Mapping[str, Json]) -> None:
        # The last line is kept in memory and written again when values of the same step are added.
        if self._last.get("step") != step:
            self._last_start = self._file.size
            self._last = {"step": step}
        self._last |= {"wall_time": self._clock(), **found}
        self._file.truncate(self._last_start)
        self._file.write(json.dumps(self._last, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


#: A histogram has a bin for each whole number if all values are whole and below this, else so many equal bins.
_MOST_WHOLE, _EQUAL_BINS = 1000, 30


def _binned(values: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return those of ``values`` that are finite, and the edges of their bins."""
    numbers = values.detach().cpu().double().numpy()
    numbers = numbers[np.isfinite(numbers)]
    if ((numbers >= 0) & (numbers < _MOST_WHOLE) & (numbers % 1 == 0)).all():
        return numbers, np.arange(numbers.max(initial=0.0) + 2) - 0.5
    return numbers, np.histogram_bin_edges(numbers, _EQUAL_BINS)


#: How every line begins, and so what a kill leaves of one.
_BEGIN = b'{"step": '


def _end_of(path: Path, step: int | None) -> int:
    """Return the byte where the lines after ``step`` begin.

    Long files, with a million lines, are searched from the end. The rest of a last line that a kill has left is
    dropped. The file is never flushed, so a node that died may have left other lines that cannot be read. Then it is
    kept under another name, and the good lines are written anew. Only that takes room on the disk, which may be full.
    """
    if step is None or not fsio.is_there(path) or not path.stat().st_size:
        return 0
    if path.stat().st_size < limits().metrics_read_whole_bytes:
        *lines_of_file, _ = fsio.read_bytes(path).split(b"\n")
        if any(_step_in(line + b"\n") is None for line in lines_of_file):
            return _written_anew(path, step)
    with fsio.open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        end = lines.rfind(b"\n") + 1
        # Line by line from the end, until one is of the resumed step or before.
        rest = lines[end:]
        if _step_in(rest + b"\n") is not None:  # only the line break is missing
            end = len(lines)
        elif not _BEGIN.startswith(rest[: len(_BEGIN)]) or b"\0" in rest:
            return _written_anew(path, step)  # no kill leaves that: lines before the step may be lost
        while end:
            start = lines.rfind(b"\n", 0, end - 1) + 1
            found = _step_in(lines[start:end])
            if found is None:
                break  # it cannot be read: read the whole file instead
            if found <= step:
                return end
            end = start
        else:
            return 0
    return _written_anew(path, step)


def _written_anew(path: Path, step: int) -> int:
    """Keep only the good lines up to ``step``; return their size in bytes."""
    lines = [line + b"\n" for line in fsio.read_bytes(path, fsio.LONG_BYTES).split(b"\n")]
    good = [line for line in lines if (found := _step_in(line)) is not None and found <= step]
    log.warning("%s has lines that cannot be read; it is kept as %s", path, fsio.set_aside(path).name)
    fsio.write_atomic(path, b"".join(good))
    return path.stat().st_size


def _step_in(line: bytes) -> int | None:
    """Return the step of a line. None for one that cannot be read, or has no line break."""
    try:
        found = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return found if type(found) is int and found >= 0 else None


def _last_line(path: Path) -> bytes:
    with fsio.open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            return lines[lines.rfind(b"\n", 0, size - 1) + 1 :]


class TensorBoardSink(Sink):
    """One event file per attempt, in one folder and with one x axis, the step. Rank 0 only.

    The records and summaries are those of TensorBoard and `torch.utils.tensorboard`. The file is not `SummaryWriter`'s
    but ours, for three reasons. Its name: TensorBoard reads the files of a folder in the order of the time in their
    names. A purge in a file dated before the one it must purge (a resume on a node whose clock is behind) would do
    nothing; here the time is at least the last file's plus one second. Its mode: 0600. Its flush: to the disk.
    """

    def __init__(
        self,
        folder: Path,
        purge_step: int = 0,
        clock: Callable[[], float] = time.time,
        logged: Collection[str] = (),
    ) -> None:
        """Open a new file that drops older files' steps from `purge_step` on; 0 drops all.

        What is logged again for a step before the resumed one (the config at step 0) is dropped: it is there already.
        So are the tags `logged` at the resumed step: a loop may have evaluated after its save.
        """
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        fsio.make_dir(folder, parents=0)
        # TensorBoard reads the files in the order of these stamps: ours must be the last.
        stamps = [_EVENT_FILE.fullmatch(path.name) for path in folder.iterdir()]
        latest = max((int(match[1]) for match in stamps if match), default=0)
        stamp = max(int(clock()), latest + 1)
        # Events get the time of their file: with the clock's their times would run backwards.
        self._ahead_s = max(0.0, stamp - clock())
        self._clock = clock
        self._summary: Any = summary
        self._event = event_pb2
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = fsio.PatientFile(folder / name)
        self._records = RecordWriter(self._file)
        self._resumed_step, self._logged = max(purge_step - 1, 0), logged
        self._write(file_version="brain.Event:2")
        # In the first file too: TensorBoard's Python server does not count the first START it sees as a restart, so it
        # would ignore the purge of the second attempt.
        self._write(step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self._file.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write all values as one event. With one event for each the file would be twice as large."""
        together = self._event.Event().summary
        for tag, value in values.items():
            if step != self._resumed_step or tag not in self._logged:
                together.value.add(tag=tag, simple_value=float(value))
        self._add(step, together)
        self._file.flush()

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Write a histogram. Without a finite value there is none."""
        numbers, edges = _binned(values)
        if numbers.size:
            self._add(step, self._summary.histogram(tag, numbers, edges))
            self._file.flush()

    def hparams(self, values: Mapping[str, bool | int | float | str], metrics: Sequence[str] = ()) -> None:
        """Write to this run's own file. `SummaryWriter.add_hparams` makes a second run, shown as a second curve."""
        experiment, start, _ = self._summary.hparams(dict(values), dict.fromkeys(metrics, 0.0))
        self._add(0, experiment)
        self._add(0, start)
        self._file.flush()

    def completed(self, step: int) -> None:
        """Write the session's end, without which TensorBoard's HPARAMS page says STATUS_UNKNOWN."""
        _, _, end = self._summary.hparams({}, {})
        self._add(step, end)
        self._file.flush()

    def text(self, tag: str, text: str, step: int = 0, *, markdown: bool = False) -> None:
        """Write a text. TensorBoard renders Markdown, which leaves text indented by four spaces unchanged."""
        block = text if markdown else "".join(f"    {line}\n" for line in text.splitlines())
        self._add(step, self._summary.text(tag, block))
        self._file.flush()

    def images(self, tag: str, images: torch.Tensor, step: int = 0) -> None:
        """Write uint8 images. Floats are stretched from their smallest and largest value to 0 and 255."""
        from torch.nn.functional import pad

        plain = images.detach().cpu()
        if plain.is_floating_point():
            low, high = plain.float().aminmax()
            plain = ((plain.float() - low) / (high - low).clamp_min(1e-12) * 255).round()
        # Small images are enlarged to a width of about 64 pixels. Each has a gap to its neighbor in the grid.
        times = max(1, 64 // plain.shape[-1])
        blocks = plain.byte().repeat_interleave(times, dim=-1).repeat_interleave(times, dim=-2)
        self._add(step, self._summary.image(tag, pad(blocks, (2, 2, 2, 2), value=128), dataformats="NCHW"))
        self._file.flush()

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, summary: Any) -> None:
        if step >= self._resumed_step:
            self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=self._clock() + self._ahead_s, **fields)
        self._records.write(event.SerializeToString())


def build_sinks(run_dir: Path, is_main: bool, resumed_step: int | None) -> Sink:
    """Return the sinks of one rank. `resumed_step` is the loaded checkpoint's, None for a start without one."""
    if not is_main:
        return Sink()
    folder = run_dir / "tensorboard"
    purge_step = 0 if resumed_step is None else resumed_step + 1
    lines = JsonlSink(folder / "metrics.jsonl", resumed_step)
    return FanOut([TensorBoardSink(folder, purge_step, logged=lines.tags(resumed_step)), lines])
