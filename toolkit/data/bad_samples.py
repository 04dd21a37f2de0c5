"""The bad samples of a run: their number, and ``bad_samples.jsonl``, which lists each once.

A worker sends them with the batch, the rank reports them to rank 0 through the store, and only rank 0 writes. It
collects where the ranks have just met (at a logging step, before a save): so no checkpoint comes after a sample that is
not listed yet.
"""

from __future__ import annotations

import dataclasses
import json

from toolkit.base import fsio, logs
from toolkit.base.errors import ConfigError, listing
from toolkit.files import records
from toolkit.files.rundir import RunDir
from toolkit.ranks.batch import BadSample, Batch
from toolkit.ranks.session import Session

#: Number of bad samples named in the log; after that only their count is logged.
NAMED = 10

log = logs.get(__name__)


class BadSampleList:
    """One rank's record of bad samples. Rank 0's has those of all ranks.

    ``most`` is ``data.max_bad_samples``. Raises ConfigError on rank 0 when the run has more: a restart would meet them
    again.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self._most = most
        self._path = RunDir(session.run_dir).bad_samples
        self._topic = f"bad_samples/{session.attempt}"
        self._reported: set[int] = set()  #: by this rank
        self._collected = 0  #: reports that rank 0 has read
        self._listed: dict[int, BadSample] = {}
        self._lines = fsio.PatientLines(self._path)
        # Bad samples of earlier attempts count, too.
        if session.is_main:
            self._listed = {bad.index: bad for bad in records.read_lines(self._path, BadSample)}
            self._refuse_too_many()

    def note(self, batch: Batch | None) -> None:
        """Report to rank 0 the bad samples that this rank meets for the first time."""
        for bad in batch.bad if batch is not None else ():
            if bad.index not in self._reported:
                self._reported.add(bad.index)
                number = self._session.store.add(f"{self._topic}/count", 1) - 1
                self._session.store.set(f"{self._topic}/{number}", json.dumps(dataclasses.asdict(bad)))

    def collect(self) -> None:
        """List what all ranks have noted up to the last collective. Ranks other than 0 do nothing."""
        if not self._session.is_main:
            return
        store, reports = self._session.store, []
        for number in range(self._collected, store.add(f"{self._topic}/count", 0)):
            key = f"{self._topic}/{number}"
            if not store.check([key]):  # counted, but not stored yet: of a step that rank 0 has not done
                break
            reports.append(BadSample(**json.loads(store.get(key))))
            store.delete_key(key)
            self._collected += 1
        new = []
        for bad in sorted(reports, key=lambda bad: bad.position):
            # Several ranks may meet a sample, and an earlier attempt may have listed it.
            if bad.index not in self._listed:
                self._listed[bad.index] = bad
                new.append(bad)
                if len(self._listed) <= NAMED:
                    log.warning("%s cannot be loaded and is replaced by another sample: %s", bad, bad.error)
        if new and len(self._listed) > NAMED:
            log.warning("%d samples cannot be loaded; they are listed in %s", len(self._listed), self._path)
        self._lines.write([dataclasses.asdict(bad) for bad in new])
        self._refuse_too_many()

    def figures(self, position: int) -> dict[str, float]:
        """Collect, and return for TensorBoard how many bad samples come before ``position`` of the run.

        They are counted by position, because a resumed run has listed already what it is about to meet again.
        """
        self.collect()
        return {"data/bad_samples": sum(bad.position < position for bad in self._listed.values())}

    def _refuse_too_many(self) -> None:
        if len(self._listed) <= self._most:
            return
        which = listing([f"{bad}: {bad.error}" for bad in self._listed.values()])
        raise ConfigError(
            f"data.max_bad_samples: {len(self._listed)} samples cannot be loaded, more than {self._most}: {which}. "
            f"All are in {self._path}, and count again in a resume. If they are repaired, or the storage is back, "
            "remove that file; else set data.max_bad_samples higher. Then resume"
        )
