"""A profile of some steps of one rank: a trace, and the use of memory.

The trace is torch's, for Perfetto or Chrome, with an entry ``step N`` around each step. It is written in a thread while
the training goes on. A profile that fails is reported, and nothing else: a full disk must not end a training.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.base import fsio, logs
from toolkit.devices import accelerator
from toolkit.devices.kinds import CPU, CUDA, ROCM
from toolkit.run.records.stop_request import Answer

#: At the end of a training, or of a stop, the files that are being written have this time.
LAST_WAIT_S = 20.0
#: Allocations that a GPU's memory snapshot holds, the last ones.
MAX_ALLOCATIONS = 200_000
#: Rows of the table of memory by operator.
TABLE_ROWS = 100

log = logs.get(__name__)


class StepProfile:
    """Profiles the steps from ``first`` on. The training's thread makes all calls."""

    def __init__(
        self, folder: Path, rank: int, first: int, steps: int, *, memory: bool, answer: Callable[[Answer], None]
    ) -> None:
        """Begin to record. ``answer`` gets the outcome, from a thread."""
        self._folder, self._rank, self._answer = folder, rank, answer
        self._first, self._last, self._memory = first, first + steps, memory
        self._step = ExitStack()  #: the entry of the step in progress
        self._thread: threading.Thread | None = None
        self._has_failed = False
        kind = accelerator.kind()
        self._on_gpu = kind is not CPU
        # torch's profiler knows ROCm's GPUs by the name of CUDA's, and a device of a package as PrivateUse1.
        of_device = getattr(ProfilerActivity, kind.type.upper(), ProfilerActivity.PrivateUse1)
        activities = [ProfilerActivity.CPU, *([of_device] if self._on_gpu else [])]
        # acc_events changes nothing in a single recording; without it torch 2.11 warns of the next one.
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=memory, acc_events=True)
        has_history = memory and kind in (CUDA, ROCM)
        self._history: Any = (
            accelerator.module_of(torch.device(accelerator.kind().type)).memory if has_history else None
        )
        if self._history is not None:
            self._history._record_memory_history(max_entries=MAX_ALLOCATIONS)
        self._profile.start()
        self._begin_step(first)

    def pass_step(self, step: int) -> bool:
        """Note that ``step`` steps are done. Return False after the last one, or if the profile has failed."""
        try:
            self._step.close()
            if step < self._last:
                self._begin_step(step)
                return True
            self._end(step)
        except Exception as error:  # whatever the profiler raises
            self._fail(error)
        return False

    def close(self, step: int) -> None:
        """End the profile early, after ``step`` steps: the training ends. Wait a while for the files."""
        if self._thread is None and not self._has_failed:
            try:
                self._step.close()
                self._end(step)
            except Exception as error:
                self._fail(error)
        if self._thread is not None:
            self._thread.join(LAST_WAIT_S)

    def _begin_step(self, step: int) -> None:
        self._step.enter_context(record_function(f"step {step}"))

    def _end(self, step: int) -> None:
        """Stop to record, and write the files in a thread."""
        snapshot: Any = None
        if self._on_gpu:
            torch.accelerator.synchronize()  # the kernels of the last step belong to it
        self._profile.stop()
        if self._history is not None:
            snapshot = self._history._snapshot()
            self._history._record_memory_history(enabled=None)
        self._thread = threading.Thread(target=self._write, args=[step, snapshot], name="toolkit-profile", daemon=True)
        self._thread.start()

    def _write(self, step: int, snapshot: Any) -> None:
        try:
            name = f"step-{self._first:08d}-rank-{self._rank}"
            fsio.make_dir(self._folder, parents=0)
            files = [self._write_trace(self._folder / f"{name}.json.gz")]
            if self._memory:
                # A GPU's snapshot, which pytorch.org/memory_viz shows; on a CPU the memory that each operator took.
                path = self._folder / f"{name}-memory"
                if snapshot is not None:
                    path = path.with_suffix(".pickle")
                    fsio.write_atomic(path, pickle.dumps(snapshot))
                else:
                    path = path.with_suffix(".txt")
                    averages = self._profile.key_averages(group_by_input_shape=True)
                    fsio.write_atomic(path, averages.table(sort_by="self_cpu_memory_usage", row_limit=TABLE_ROWS))
                files.append(path)
            log.info("profile: %s", ", ".join(map(str, files)))
            self._answer(Answer(step=self._first, steps=step - self._first, files=tuple(map(str, files))))
        except Exception as error:
            self._fail(error)

    def _write_trace(self, path: Path) -> Path:
        path.unlink(missing_ok=True)  # of an attempt that went back to this step
        plain = path.with_name(f".{path.name}.plain")
        try:
            self._profile.export_chrome_trace(str(plain))
            _refuse_cut_off(plain)
            with fsio.new_path(path) as packed, plain.open("rb") as trace, gzip.open(packed, "wb") as out:
                shutil.copyfileobj(trace, out, 1 << 20)
        finally:
            for left in self._folder.glob(f"{plain.name}*"):  # the profiler begins under another name
                left.unlink()
        return path

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        log.warning("the profile has failed, the training goes on: %s: %s", type(error).__name__, error)
        if self._thread is None:  # it may still record, which slows the steps
            with suppress(Exception):
                self._profile.stop()
            with suppress(Exception):
                if self._history is not None:
                    self._history._record_memory_history(enabled=None)
        self._answer(Answer(refused=f"the profile has failed, the training goes on: {error}"))


def _refuse_cut_off(trace: Path) -> None:
    """Raise OSError for a trace that is not whole. The profiler only logs that it could not write."""
    with suppress(FileNotFoundError), trace.open("rb") as file:
        file.seek(-min(64, trace.stat().st_size), os.SEEK_END)
        if file.read().rstrip().endswith(b"}"):
            return
    raise OSError(f"{trace.parent}: the trace could not be written, most likely because the disk is full")
