"""Profiles that users ask of ranks that train: a trace of some steps of one rank, and the use of memory.

A profile begins between two steps, on all ranks before the same one. The ranks agree on the step by the gate, as for a
stop. The trace is torch's, for Perfetto or Chrome, with an entry ``step N`` around each step. It is written in a thread
while the training continues. A profile that fails is reported, and nothing else: a full disk must not end a training.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.base import fsio, logs
from toolkit.base.errors import RequestError
from toolkit.devices import accelerator
from toolkit.devices.kinds import CPU, CUDA, ROCM
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, UserRequest

#: At the end of a training, or of a stop, the files that are being written have this time.
LAST_WAIT_S = 20.0
#: Allocations that a GPU's memory snapshot holds, the last ones.
MAX_ALLOCATIONS = 200_000
#: Rows of the table of memory by operator.
TABLE_ROWS = 100

log = logs.get(__name__)


class RequestedProfiles:
    """Profiles steps, on one rank. Every rank makes the same calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = RunDir(session.run_dir)
        self._seen: set[str] = set()
        self._profile: StepProfile | None = None  #: of this rank, the newest one
        self._profiled_until = 0  #: a rank, and all know it
        self._step = 0  #: the last one of a profile
        self.is_recording = False  #: whether this rank's profile still records, and does not just write its files

    def pass_step(self, step: int) -> None:
        """Mark the end of a step. Called after each while ``is_recording``."""
        assert self._profile is not None
        self.is_recording = self._profile.pass_step(step)
        self._step = step

    def close(self) -> None:
        """End a profile that is being made, and wait a while for its files."""
        if self._profile is not None:
            self._profile.close(self._step)

    def carry_out(self, kind: str, step: int) -> None:
        """Do what is asked for under the agreed ``kind``, once in an attempt."""
        request_id = kind.removeprefix(user_requests.KIND)
        if request_id in self._seen:
            return
        self._seen.add(request_id)
        told = self._session.from_main(f"request/{request_id}", partial(self._decide, request_id, step))
        if not told:
            return
        request = UserRequest.from_json(told)
        self._profiled_until = step + request.steps
        if request.rank != self._session.rank:
            return
        log.info("step %d: profiling %d steps", step, request.steps)
        answer = partial(self._answer, request_id)
        try:
            self._profile = StepProfile(self._run.path / "profiles", request, step, answer)
            self.is_recording = True
        except Exception as error:  # the job's own profiler runs, for example
            log.warning("no profile can be made: %s: %s", type(error).__name__, error)
            answer(Answer(refused=f"no profile can be made: {error}"))

    def _decide(self, request_id: str, step: int) -> dict[str, Any]:
        """Return the request, on rank 0. Empty where it is answered or withdrawn, or cannot be carried out."""
        try:
            request = user_requests.read_request(self._run, request_id)
            if request is None or not self._session.owns_run():
                return {}
            if step < self._profiled_until:
                raise RequestError(f"a profile is being made up to step {self._profiled_until}: try again after it")
            if request.rank >= self._session.world_size:
                raise RequestError(f"there is no rank {request.rank}")
            return request.to_json()
        except (OSError, RequestError) as error:
            log.warning("a user's request is not carried out: %s", error)
            self._answer(request_id, Answer(refused=f"nothing was done: {error}"))
            return {}

    def _answer(self, request_id: str, answer: Answer) -> None:
        with suppress(OSError):  # the command says that there was no answer
            user_requests.answer(self._run, request_id, answer)


class StepProfile:
    """Profiles the steps from ``first`` on. The training's thread makes all calls."""

    def __init__(self, folder: Path, request: UserRequest, first: int, answer: Callable[[Answer], None]) -> None:
        """Begin to record. ``answer`` gets the outcome, from a thread."""
        self._folder, self._rank, self._answer = folder, request.rank, answer
        self._first, self._last, self._memory = first, first + request.steps, request.memory
        self._step = ExitStack()  #: the entry of the step in progress
        self._thread: threading.Thread | None = None
        self._has_failed = False
        kind = accelerator.kind()
        self._on_gpu = kind is not CPU
        # torch's profiler knows ROCm's GPUs by the name of CUDA's, and a device of a package as PrivateUse1.
        of_device = getattr(ProfilerActivity, kind.type.upper(), ProfilerActivity.PrivateUse1)
        activities = [ProfilerActivity.CPU, *([of_device] if self._on_gpu else [])]
        # acc_events changes nothing in a single recording; without it torch 2.11 warns of the next one.
        self._profile = profile(
            activities=activities, record_shapes=True, profile_memory=request.memory, acc_events=True
        )
        self._history: Any = None
        if request.memory and kind in (CUDA, ROCM):
            self._history = accelerator.module_of(torch.device(kind.type)).memory
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
            with fsio.atomic_path(path) as packed, plain.open("rb") as trace, gzip.open(packed, "wb") as out:
                shutil.copyfileobj(trace, out, 1 << 20)
        finally:
            for left in fsio.entries(self._folder, f"{plain.name}*"):  # the profiler begins under another name
                left.unlink()
        return path

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        log.warning("the profile has failed, the training continues: %s: %s", type(error).__name__, error)
        if self._thread is None:  # it may still record, which slows the steps
            with suppress(Exception):
                self._profile.stop()
            with suppress(Exception):
                if self._history is not None:
                    self._history._record_memory_history(enabled=None)
        self._answer(Answer(refused=f"the profile has failed, the training continues: {error}"))


def _refuse_cut_off(trace: Path) -> None:
    """Raise OSError for a trace that is not whole. The profiler only logs that it could not write."""
    with suppress(FileNotFoundError), trace.open("rb") as file:
        file.seek(-min(64, trace.stat().st_size), os.SEEK_END)
        if file.read().rstrip().endswith(b"}"):
            return
    raise OSError(f"{trace.parent}: the trace could not be written, most likely because the disk is full")
