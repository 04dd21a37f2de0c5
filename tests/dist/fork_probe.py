"""Write all that a program sees of itself: ``python [-m] probe FOLDER EXIT_CODE``. For test_fork.py."""

import atexit
import ctypes
import decimal
import faulthandler
import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy
import torch

from toolkit.nodes.agent import zygote

own = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_PORT", "_"}  # the last is set by shells
own |= {"TOOLKIT_EXEC_RANK", "TOOLKIT_LAUNCH_KEY", "TORCHELASTIC_ERROR_FILE"}
#: signal.getsignal() does not tell whether it handles them
faulty = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
names = {name: type(value).__name__ for name, value in sorted(globals().items()) if name.startswith("__")}
environ = {name: value for name, value in sorted(os.environ.items()) if name not in own}
folder = tempfile.tempdir  # some of these imports ask for it
for name in zygote.MODULES["ranks"]:
    importlib.import_module(name)
status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
main = sys.modules["__main__"]
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
death = ctypes.c_int()
libc.prctl(2, ctypes.byref(death))
mask = os.umask(0)
os.umask(mask)
same = {
    "environment": environ,
    "environment of C": {name: libc.getenv(name.encode()).decode() for name in environ},
    "a variable that is gone": str(libc.getenv(b"TOOLKIT_ROOM")),
    "folder": str(Path.cwd()),
    "umask": mask,
    "argv": [list(sys.argv), list(sys.orig_argv), sys._xoptions],
    "path": sys.path,
    "flags": str(sys.flags),
    "executable": sys.executable,
    "main": [main.__name__, main.__spec__ and main.__spec__.name, main.__file__, str(main.__package__), __name__],
    "names of main": names,
    "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals() - faulty},
    "signal masks": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "wakeup": signal.set_wakeup_fd(-1),
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")
    },
    "priority": [os.nice(0), os.sched_getscheduler(0), Path("/proc/self/oom_score_adj").read_text()],
    "cpus": sorted(os.sched_getaffinity(0)),
    "files": {fd: str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in range(3)},
    "number of files": len(list(Path("/proc/self/fd").iterdir())),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "dies with its parent": death.value,
    "threads": [[thread.name for thread in threading.enumerate()], threading.main_thread().native_id == os.getpid()],
    "collector": [gc.isenabled(), gc.get_threshold()],
    "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), time.tzname],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.isatty()] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "hooks": [str(sys.excepthook), str(threading.excepthook), faulthandler.is_enabled(), sys.gettrace() is None],
    "logging": [
        [str(h) for h in logging.getLogger().handlers],
        logging.getLogger("toolkit").handlers,
        logging.root.level,
    ],
    "warnings": [str(entry) for entry in warnings.filters],
    "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode, sys.warnoptions],
    "defaults": [socket.getdefaulttimeout(), str(multiprocessing.get_start_method(allow_none=True)), folder],
    "decimal": str(decimal.getcontext()),
    "torch": [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.cuda.is_available(),
        torch.__config__.parallel_info(),
    ],
    "sum with all threads": torch.ones(1 << 22).sum().item(),
    "command": Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip(),
    "shown": sorted(
        v for v in Path("/proc/self/environ").read_text().split("\0") if v.startswith(("RANK=", "TOOLKIT_EXEC_RANK="))
    ),
}
differ = {
    "seed of torch": torch.initial_seed(),
    "torch": torch.rand(1).item(),
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "pid": os.getpid(),
    "name": tempfile.mktemp(),
}
loaded = sorted(name for name in sys.modules if name.partition(".")[0] != "toolkit")
atexit.register(lambda: Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps([same, differ, loaded])))
sys.exit(int(sys.argv[2]))
