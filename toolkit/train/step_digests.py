"""A trace of each rank's steps, their inputs and results, for `toolkit resume-check` to compare.

It is made only when ``TOOLKIT_TRACE`` is set. Each rank appends lines to ``trace/rank-00003.jsonl`` in the run's
folder: one at its start, with its conditions, and one for each step, with digests of all that it takes and leaves.

It can also strike: ``{"strikes": {"1": {"rank": 2, "step": 37, "saved": 36, "late": 0.4, "how": "kill"}}}``
kills rank 2 of attempt 1, 0.4 of a step's time after it has begun step 37, wherever it is then. If no checkpoint of
step 36 or a later one is committed then, the first step with such a checkpoint is meant. ``stop`` asks it to stop;
with ``preempt`` the rank has Slurm requeue the job when the step begins. ``{"saves": [36]}`` has the run saved after 36
steps (:func:`toolkit.train.saver.saves_asked`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base import fsio
from toolkit.checkpoint.folder import newest_step
from toolkit.checkpoint.tensors import to_bytes
from toolkit.devices import accelerator
from toolkit.files.rundir import RunDir
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.slurm.commands import Slurm

#: What a strike sends to its rank. A preemption is the controller's.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGUSR1}
#: By then Slurm has asked the ranks to stop. Short steps would end the run before.
REQUEUED_S = 5.0


class StepDigests:
    """Writes the trace of one rank."""

    def __init__(self, brief: str, session: Session, conditions: Mapping[str, Json]) -> None:
        """``brief`` is the value of ``TOOLKIT_TRACE``."""
        self._attempt, self._checkpoints = session.attempt, RunDir(session.run_dir).checkpoints
        self._strike = json.loads(brief).get("strikes", {}).get(str(session.attempt))
        self._signal: threading.Timer | None = None
        self._has_begun = False
        self._rank = session.rank
        path = fsio.make_dir(RunDir(session.run_dir).trace, parents=0) / f"rank-{session.rank:05d}.jsonl"
        self._file = fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._began = time.monotonic()
        self._step_s = 0.0
        self._line: dict[str, Any] = {}
        self._write({"conditions": dict(conditions)})

    def begin(self, step: int, epoch: int) -> None:
        """Note that ``step`` begins, in ``epoch``. Start the timer of a signal that is due in it."""
        if self._signal is not None:
            self._signal.join()  # short steps end before the timer
        now = time.monotonic()
        self._step_s, self._began = now - self._began, now
        self._line = {"step": step, "epoch": epoch}
        if not self._has_begun:
            self._has_begun = True
            self._write({"from": step})
        strike = self._strike
        if strike is None or strike["rank"] != self._rank or step < strike["step"] or self._signal is not None:
            return
        if (newest_step(self._checkpoints) or 0) < strike.get("saved", 0):
            return
        if strike["how"] == "preempt":
            Slurm().requeue(os.environ["SLURM_JOB_ID"])
            time.sleep(REQUEUED_S)
            self._strike = None
            return
        # The delay is a fraction of the last step's time.
        self._signal = threading.Timer(strike["late"] * self._step_s, os.kill, [os.getpid(), SIGNALS[strike["how"]]])
        self._signal.daemon = True
        self._signal.start()

    def take_batch(self, step: int, batch: Any, samples: list[int]) -> None:
        """Take a digest of each sample, so that steps compare however samples are shared among ranks.

        A batch that is not one of our loader's gives the digests of its tensors, arrays, numbers and texts.
        """
        self._line["samples"] = samples
        if batch is None:
            return
        if not isinstance(batch, Batch):
            self._line["inputs"] = [text for leaf in nested.leaves(batch) if (text := _digest_of_leaf(leaf))]
            return
        # One text of digests for each sample, inputs and targets apart; one for the batch if its rows are not samples.
        self._line["positions"] = batch.positions.tolist()
        is_pair = isinstance(batch.data, (tuple, list)) and len(batch.data) == 2
        parts = {"inputs": batch.inputs, "targets": batch.targets} if is_pair else {"inputs": batch.data}
        for name, data in parts.items():
            tensors = [leaf for leaf in nested.leaves(data) if isinstance(leaf, Tensor)]
            rows: Iterable[Sequence[Tensor]] = [tensors]
            if all(tensor.ndim and len(tensor) == len(batch) for tensor in tensors):
                rows = zip(*tensors, strict=True)
            self._line[name] = [" ".join(map(_digest, row)) for row in rows]

    def take_start(self, lr: float) -> None:
        """Take the learning rate, and the random generators' state before the step."""
        states = [torch.get_rng_state(), *accelerator.random_states()]
        self._line |= {"lr": lr, "random": _digest(torch.cat(states))}

    def take_end(
        self,
        loss: Tensor,
        live: Mapping[str, Tensor],
        logged: Mapping[str, Tensor | float] | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        """Take the loss, what else the step has logged, and the tensors and state that it leaves. Write its line."""
        self._line["loss"] = float(loss.item()).hex()
        self._line["logged"] = {tag: float(value).hex() for tag, value in (logged or {}).items()}
        for name, tensor in live.items():
            kind, _, rest = name.partition("/")
            self._line.setdefault(kind, {})[rest] = _digest(tensor)
        if state is not None:
            self._line["state"] = dict(state)
        self._write(self._line)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Write a line with one system call: a rank that is killed leaves whole lines."""
        text = json.dumps({"attempt": self._attempt, **line})
        os.write(self._file, f"{text}\n".encode())


def _digest(tensor: Tensor) -> str:
    return f"{zlib.crc32(to_bytes('a tensor', tensor)):08x}"


def _digest_of_leaf(leaf: object) -> str | None:
    """Return the digest of a part of a batch. None for an object whose content is not known."""
    if isinstance(leaf, Tensor):
        return _digest(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return f"{zlib.crc32(leaf.tobytes()):08x}"
    return f"{zlib.crc32(repr(leaf).encode()):08x}" if isinstance(leaf, (bool, int, float, str, bytes)) else None
