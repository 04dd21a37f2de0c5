"""Who is behind in a run that hangs: the stack files that can be read in time, over a file system of 0.5 ms a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from tests.scale import Curve
from toolkit import stacks
from toolkit.launch import hang
from toolkit.launch.hang import Seen
from toolkit.launch.watchdog import Standing

DELAY_S = 0.0005
WAITS = 'Current thread 0x01 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 1 in all_reduce\n'


def investigate(ranks: int) -> Mapping[str, object]:
    """The last rank hangs, at the same step as all others."""
    works = WAITS.replace("torch/distributed/c10d.py", "jobs/mine.py").replace("all_reduce", "load")

    def read(path: Path) -> str:
        time.sleep(DELAY_S)
        return (works if path.stem == f"stack-{ranks - 1}" else WAITS) + stacks.ANSWERED

    standings = [Standing(rank, "in a step", 7, 300.0, False) for rank in range(ranks)]
    with patch.object(hang, "stack_text", read):
        found = hang.collect(Path("/x"), standings)
    named, _ = hang.blame([Seen(s, found.get(s.rank), is_read=s.rank in found) for s in standings])
    verdict = "right" if named == [ranks - 1] else "wrong" if named else "unknown"
    return {"files read": len(found), "rank named": verdict}


CURVES = [Curve("hang report", "ranks", (1000, 8000, 16_000, 80_000), investigate)]
