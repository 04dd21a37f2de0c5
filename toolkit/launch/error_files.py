"""What failing ranks say about their own end: ours, and those of torch.distributed.elastic's ``record``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from toolkit import fsio
from toolkit.errors import EXIT_REQUEST
from toolkit.launch.ending import RankFailure

#: Texts of CUDA, NCCL and their drivers that speak of this node's devices. A failed assertion in a kernel, a wrong
#: argument and memory that ran out are the program's, and ncclRemoteError speaks of some other node.
_DEVICE_ERROR = re.compile(
    r"(?:CUDA|HIP) error: (?!device-side assert|invalid (?:argument|configuration|device function|value|resource)"
    r"|no kernel image|out of memory|operation not)"
    r"|uncorrectable ECC|\bXid\b|GPU is lost|fallen off the bus|No CUDA GPUs are available|CUDA unknown error"
    r"|CUDA driver initialization failed|Unexpected error from cudaGetDeviceCount"
    r"|ncclSystemError|ncclUnhandledCudaError",
)


def read_error_file(path: Path) -> RankFailure:
    """What a rank said about its own end: ours, or in the format of torch.distributed.elastic's ``record``."""
    said = _said_in(path)
    how = f"{said['type']}: {said['message']}" if "type" in said else str(said.get("message", "no message"))
    rank = int(path.stem.removeprefix("error-"))
    memory = "OutOfMemory" in how or "CUDA out of memory" in how
    return RankFailure(
        rank,
        host=str(said.get("host", "?")),
        how=how,
        time=float(said.get("time") or path.stat().st_mtime),
        traceback=str(said.get("traceback", "")),
        out_of_memory=memory,
        blames_node=_DEVICE_ERROR.search(how) is not None and not memory,
        is_request_error=said.get("exit_code") == EXIT_REQUEST,
    )


def _said_in(path: Path) -> dict[str, Any]:
    """Empty where there is but a part: torch writes in place, and a kill or a full disk may come in between."""
    try:
        said = fsio.read_json(path)
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    inner = said.get("message")
    if not isinstance(inner, dict):
        return said
    info = inner.get("extraInfo") or {}
    told = {"message": inner.get("message"), "traceback": info.get("py_callstack"), "time": info.get("timestamp")}
    return {name: value for name, value in told.items() if value is not None}
