"""Error files of failing ranks, read by the supervisor at the end of an attempt."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from tests.scale import Curve
from toolkit.base import fsio
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.supervise.conclude import add_error_files


def read(ranks: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        logs = fsio.make_dir(run.attempt_logs(1))
        for rank in range(ranks):
            (logs / f"error-{rank}.json").write_text('{"host": "node1", "time": 1.0, "type": "E", "message": "m"}')
        attempt = Attempt(1, time.time(), Allocation(("node1",), (ranks,), 1))
        add_error_files(SimpleNamespace(run=run, is_script=False), attempt)  # type: ignore[arg-type]
        return {"failures": len(attempt.failures)}


CURVES = [Curve("error files", "ranks", (1000, 4000, 16_000), read)]
