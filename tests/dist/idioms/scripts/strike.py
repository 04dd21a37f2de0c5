"""Runs a script with the signals of a test: `python strike.py PLAN SCRIPT ARGUMENTS`. The script knows nothing of it.

PLAN is a JSON file: {"1": {"rank": 0, "step": 7}} kills rank 0 of attempt 1 after 7 steps of its optimizer in it. With
"reached" it writes that file instead, and steps slowly from there on.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

plan = json.loads(Path(sys.argv[1]).read_text()).get(os.environ["TOOLKIT_ATTEMPT"])
made = 0


def strike(*_):
    global made
    made += 1
    if made < plan["step"]:
        return
    if "reached" not in plan:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(plan["reached"]).touch()
    time.sleep(0.1)


if plan is not None and plan["rank"] == int(os.environ["RANK"]):
    register_optimizer_step_post_hook(strike)
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
