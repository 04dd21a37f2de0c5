"""What torch and the drivers say when a device fails, or has no memory left."""

from __future__ import annotations

import re

_RUNTIME = "(?:CUDA|HIP|XPU)"

#: A text is about some device, whatever it says.
OF_DEVICES = r"cuda|\bhip\b|\bxpu\b|level_zero"
#: A device has no memory left. torch's own exception has one name for all kinds.
DEVICE_OUT_OF_MEMORY = re.compile(
    rf"OutOfMemory|{_RUNTIME} out of memory|{_RUNTIME} (?:driver )?error: out of memory|'out of memory'"
    r"|(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY|(?:cuda|hip)ErrorMemoryAllocation|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
)
#: This node's devices or their drivers are at fault. A failed assertion in a kernel, a wrong argument and lack of
#: memory are the program's fault, and ncclRemoteError is about some other node.
DEVICE_ERROR = re.compile(
    rf"{_RUNTIME} error: (?!device-side assert|invalid (?:argument|configuration|device function|value|resource)"
    r"|no kernel image|out of memory|operation not)"
    r"|uncorrectable ECC|\bXid\b|GPU is lost|fallen off the bus|No (?:CUDA|HIP) GPUs are available|CUDA unknown error"
    r"|No XPU devices are available|CUDA driver initialization failed|Unexpected error from (?:cuda|hip)GetDeviceCount"
    r"|(?:UR|ZE)_RESULT_ERROR_DEVICE_LOST|ncclSystemError|ncclUnhandledCudaError"
)
