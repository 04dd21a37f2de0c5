"""Lines of attempts.jsonl, for tests."""

from typing import Any

from toolkit.files.run_files import AttemptRecord


def attempt(number: int, cause: str, decision: str, **more: Any) -> AttemptRecord:
    """Return a line of attempts.jsonl."""
    keys = {
        "attempt": number,
        "job_id": "41",
        "restart_count": 0,
        "nodes": "node[1-2]",
        "world_size": 4,
        "started": "2026-11-20T15:00:00.000+00:00",
        "ended": "2026-11-20T15:01:00.000+00:00",
        "cause": cause,
        "decision": decision,
        "step_start": 0,
        "step_end": None,
        "first_failure": None,
        "line": f"{cause}, so {decision}",
        **more,
    }
    return AttemptRecord.from_json(keys)
