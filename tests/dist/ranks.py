"""Run a function on a few ranks, and return their results.

Each rank is a fresh process, on gloo or as a job has it. The processes are forked from a server that has imported torch
once: an import in each would cost 3 CPU seconds.
"""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from torch.distributed import TCPStore

from tests.waiting import wait_for
from toolkit.base.errors import ConfigError
from toolkit.config import DistConfig
from toolkit.ranks.agreement import STOP, Gate
from toolkit.ranks.session import Session

#: Where the ranks of gloo compute if not on the CPU: `cuda:0` has them share a GPU, which NCCL does not let them.
DEVICE_VARIABLE = "TOOLKIT_TEST_DEVICE"
#: A hang; on a busy machine all takes several times as long.
LIMIT_S = 300.0
#: torch._dynamo as well: the first optimizer of a process imports it, for another 2 s.
PRELOAD = [
    "torch._dynamo",
    "torch.distributed",
    "toolkit.strategies",
    "toolkit.train.loop",
    "tensorboard.summary.writer.record_writer",
    "torch.utils.tensorboard.summary",
]


def device() -> str:
    """Return where a rank of gloo has its model and its batches."""
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = LIMIT_S,
    job: DistConfig | None = None,
) -> list[Any]:
    """Return the results of ``function(session, *args)`` on every rank of a fresh process group.

    The results are in the order of the ranks. ``function`` must be importable by name, arguments and results must
    survive ``pickle``. Raises AssertionError with the traceback of the first rank that fails, and when a rank is not
    done after ``limit_s``. With ``job`` the session is the one that this section of a config gives a job's rank, on its
    GPU if there is one.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # before the server starts: its children inherit it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        call = pickle.dumps((function, args, limit_s, job, device()))
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, store.port, folder, call, pipes[rank][1]), daemon=True
            )
            for rank in range(world_size)
        ]
        for rank, (_, sending) in zip(ranks, pipes, strict=True):
            rank.start()
            sending.close()
        try:
            return _results([receiving for receiving, _ in pipes], limit_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def stop_all(gate: Gate) -> None:
    """Ask all ranks to stop, and return once this rank's gate is closed.

    Without that wait the steps that are left may be over before the ranks have agreed.
    """
    gate.request(STOP)
    wait_for(lambda: gate.pending == STOP, 60, "the stop to be heard of")


def _results(pipes: list[Connection], limit_s: float) -> list[Any]:
    """Wait for all results. The first failure ends the wait, since other ranks may hang in a collective then."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(results) < len(pipes):
        ready = wait([pipe for i, pipe in enumerate(pipes) if i not in results], timeout=deadline - time.monotonic())
        missing = sorted(set(range(len(pipes))) - set(results))
        assert ready, f"ranks {missing} were not done after {limit_s:.0f} s"
        for pipe in cast(list[Connection], ready):
            rank = pipes.index(pipe)
            done, results[rank] = _received(pipe)
            assert done, f"rank {rank}:\n{results[rank]}"
    return [results[rank] for rank in range(len(pipes))]


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "the process ended without an answer"


def refused_with(call: Callable[[], object]) -> str:
    """Return the words with which ``call`` is refused. Raises AssertionError if it is not."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def told_by_us(level: int = logging.NOTSET) -> list[str]:
    """Return a list that gets what the toolkit logs in this rank from now on."""
    told: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("toolkit").addHandler(handler)
    return told


def in_run(session: Session, run_dir: Path, attempt: int | None = None) -> Session:
    """Return ``session`` in the run folder ``run_dir``, which is made as a submission would."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return replace(session, run_dir=run_dir, attempt=session.attempt if attempt is None else attempt)


def _rank(rank: int, world_size: int, port: int, folder: str, call: bytes, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, args, limit_s, job, os.environ[DEVICE_VARIABLE] = pickle.loads(call)
    faulthandler.dump_traceback_later(limit_s - 5)  # shows where a rank hangs, before it is killed
    place = (rank, world_size, port, folder)
    opened = _on_gloo(*place) if job is None else _as_in_a_job(*place, job)
    with opened as session:
        try:
            answer = pickle.dumps((True, function(session, *args)))
            dist.barrier()  # a rank that leaves early takes its connections, and the others' last messages, with it
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        session.gate.close()
        pipe.send_bytes(answer)


@contextmanager
def _on_gloo(rank: int, world_size: int, port: int, folder: str) -> Iterator[Session]:
    import torch
    import torch.distributed as dist

    from toolkit.ranks.agreement import Gate
    from toolkit.ranks.agreement.torch_store import connector
    from toolkit.ranks.report import Reporter

    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    gate = Gate(rank, world_size, connector(store))
    yield Session(rank, world_size, rank, torch.device(device()), Path(folder), 1, store, Reporter(), gate)
    dist.destroy_process_group()


def _as_in_a_job(
    rank: int, world_size: int, port: int, folder: str, job: DistConfig
) -> AbstractContextManager[Session]:
    from toolkit.ranks.session import open_session

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), TOOLKIT_RUN_DIR=folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    return open_session(job)
