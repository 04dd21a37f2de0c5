"""Run a library's script on two ranks, as often as a test needs.

Each rank is forked from a process that has imported the library, since an import of Lightning or transformers costs 10
CPU seconds. The ranks are launched as by torchrun, with RANK and an agent's store, and with a run folder of ours. A
strike is a signal that a rank gets at an exact moment.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
#: What the scripts' libraries load late.
PRELOAD = {
    "accelerate": ["torch._dynamo", "accelerate"],
    "lightning": ["torch._dynamo", "lightning", "torchdata.stateful_dataloader", "rich.progress"],
    "transformers": ["torch._dynamo", "transformers.trainer", "transformers.models.bert.modeling_bert"],
}


class ScriptServer:
    """Starts attempts of scripts, in processes that have imported ``modules`` already."""

    def __init__(self, modules: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "tests.dist.script_ranks", *modules]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )

    def close(self) -> None:
        """End the process; no rank runs any more."""
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()

    def attempt(
        self,
        script: Path,
        folder: Path,
        overrides: Sequence[str] = (),
        strikes: Sequence[Mapping[str, Any]] = (),
        ranks: int = 2,
        words: Sequence[str] = (),
    ) -> list[int]:
        """Run ``script`` with ``folder`` as its run's, and return the ranks' exit codes. ``words`` are its arguments.

        Their logs are beside the folder. A strike is ``{"rank": 1, "step": 37, "signal": "SIGTERM", "at": "step"}``. It
        may also be at "save" or "saved".
        """
        from torch.distributed import TCPStore

        for part in ("logs", "cwd"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # The logs of earlier attempts tell the number of this one.
        number = len(list(folder.parent.glob(f"{folder.name}.*.0.log"))) + 1
        common = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_RUN_ID": folder.name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": number - 1,
            "TOOLKIT_ATTEMPT": number,
            "TOOLKIT_RUN_DIR": folder,
            "TOOLKIT_CONFIG": json.dumps([None, *overrides]),
        }
        calls = [
            {
                "environ": {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
                "script": [str(script), *words],
                "cwd": str(folder / "cwd"),
                "log": str(folder.with_name(f"{folder.name}.{number}.{rank}.log")),
                "strikes": [strike for strike in strikes if strike["rank"] == rank],
            }
            for rank in range(ranks)
        ]
        print(json.dumps(calls), file=self._process.stdin, flush=True)
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes


def serve() -> dict[str, Any] | None:
    """Fork the ranks of each attempt and say how they ended. In a rank: return what it is to do."""
    for line in sys.stdin:
        pids = []
        for call in json.loads(line):
            pid = os.fork()
            if not pid:
                return dict(call)
            pids.append(pid)
        print(json.dumps(_codes(pids)), flush=True)
    return None


def _codes(pids: list[int]) -> list[int]:
    """Wait as a launcher does: once a rank has failed the others are ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] not in (0, 75):
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _be_a_rank(call: Mapping[str, Any]) -> None:
    log = os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.update(call["environ"])
    os.chdir(call["cwd"])
    for strike in call["strikes"]:
        _arm(strike)
    sys.argv = list(call["script"])
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as for `python script.py`
    runpy.run_path(sys.argv[0], run_name="__main__")


def _arm(strike: Mapping[str, Any]) -> None:
    """Have this process get the strike's signal at its moment."""
    from toolkit.train.saver import Saver
    from toolkit.train.user_loop import TrainingRun

    def hit() -> None:
        os.kill(os.getpid(), signal.Signals[strike["signal"]])

    if strike["at"] == "step":
        count = TrainingRun._count_step

        def count_step(self: TrainingRun) -> None:
            count(self)
            if self.step == strike["step"]:
                hit()
            elif self.step > strike["step"]:  # else the run's end may come before the ranks have agreed to stop
                time.sleep(0.1)

        TrainingRun._count_step = count_step
        return
    include = Saver.include_files

    def include_files(self: Saver, write_files: Callable[[Path], None]) -> None:
        def struck(folder: Path) -> None:
            is_its_step = folder.name.startswith(f"step-{strike['step']:08d}")
            if is_its_step and strike["at"] == "save":
                hit()
            write_files(folder)
            if is_its_step:
                hit()

        include(self, struck)

    Saver.include_files = include_files


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    what = serve()
    if what is not None:
        _be_a_rank(what)
