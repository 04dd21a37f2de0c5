"""The record of ``make gpu`` as JSON and as a table: machine, tests and figures."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

#: The files' path without its ending. Without it nothing is written.
VARIABLE = "TOOLKIT_GPU_FIGURES"


@dataclass
class Tested:
    """One test: its outcome as pytest has it, its seconds, and its figures."""

    name: str
    outcome: str
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    reason: str = ""  #: why it failed or was skipped, in a line


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "cpus": os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "revision": _first_line("git", "rev-parse", "--short", "HEAD"),
    }
    if gpus:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _first_line(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.partition("\n")[0] or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def write(tests: Sequence[Tested], about: Mapping[str, Any], path: Path) -> None:
    """Write ``path``.json and ``path``.md. Other tests that the first already holds stay in it."""
    kept, names = path.with_suffix(".json"), {test.name for test in tests}
    before = json.loads(kept.read_text())["tests"] if kept.exists() else []
    before = [test for test in before if test["name"] not in names]
    record = {"machine": dict(about), "tests": [*before, *map(asdict, tests)]}
    kept.write_text(json.dumps(record, indent=2) + "\n")
    path.with_suffix(".md").write_text("\n".join(table(record)) + "\n")


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record's table."""
    lines = [f"{key}: {value}  " for key, value in record["machine"].items()]
    lines += ["", "| test | | s | figures |", "|---|---|---|---|"]
    for test in (Tested(**each) for each in record["tests"]):
        figures = ", ".join(f"{name} {value:.4g}" for name, value in test.figures.items())
        told = "; ".join(filter(None, (figures, test.reason))).replace("|", "\\|")
        lines.append(f"| {test.name} | {test.outcome} | {test.seconds:.1f} | {told} |")
    return lines
