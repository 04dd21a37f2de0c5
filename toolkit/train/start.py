"""``toolkit.start()`` and ``toolkit.current()``: the run of a script with a loop of its own."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch.distributed as dist

from toolkit.base import logs, signals
from toolkit.base.errors import ConfigError, StoppedError
from toolkit.config import JobConfig
from toolkit.data.randomness import apply_gpu_settings, seed_for_init
from toolkit.ranks.session import Session, open_session
from toolkit.run.rank import script_end
from toolkit.run.rank.main import rank_config
from toolkit.train.user_loop import TrainingRun

#: Environment variable with the id of the process that has called :func:`start`.
STARTED_VARIABLE = "TOOLKIT_STARTED"

log = logs.get(__name__)


def join_once(caller: str, name: str | None = None) -> JobConfig:
    """Return this process's config. Raises ConfigError, naming the ``caller``, for a second run in the process.

    ``name`` is the run's where no config names it.
    """
    if os.environ.get(STARTED_VARIABLE) == str(os.getpid()):
        raise ConfigError(
            f"{caller}: called twice in one process: a run has one loop. Several trainings, as the folds of a "
            "cross-validation, are several runs: toolkit sweep train.py args.fold=0,1,2"
        )
    os.environ[STARTED_VARIABLE] = str(os.getpid())
    return rank_config(name)


def start(name: str | None = None) -> StartedRun:
    """Open the process group, the device and the run's folder, and return the run.

    It ends with the ``with`` block, or without one with the script. It works under ``toolkit submit``,
    ``toolkit exec``, ``toolkit run``, srun, torchrun, mpirun and alone; ``name`` is the run's where no config names
    it. A second call in a process raises ConfigError. When all ranks have agreed to stop, the process ends with exit
    code 75::

        >>> with toolkit.start() as run:
        ...     model = torch.nn.Linear(1, 1).to(run.device)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     run.resumable(model=model, optimizer=optimizer)
        ...     for x in run.steps(torch.ones(20, 1), total=20):
        ...         loss = (model(x) - 2 * x).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         run.log(loss=loss)
        >>> loss.item() < 0.1
        True
    """
    # The session opens the process group itself, on the backend and with the timeout of the config.
    if dist.is_initialized():
        raise ConfigError(
            "toolkit.start: there is a process group already: take out init_process_group(), "
            "or the function of a library that calls it"
        )
    config = join_once("toolkit.start", name)
    cluster = config.cluster
    with ExitStack() as stack:
        session = stack.enter_context(open_session(config.dist, cluster.gpus_per_node, cluster.tasks_per_gpu))
        seed_for_init(config.train.seed, deterministic=config.train.deterministic)
        apply_gpu_settings(config.train)
        return StartedRun(config, session, stack.pop_all())


def current() -> StartedRun:
    """Return the run that this process has started. Raises ConfigError where none is open::

    >>> def note(loss: torch.Tensor) -> None:  # called from within the loop, and not given the run
    ...     toolkit.current().log(loss=loss)
    >>> toolkit.current()
    Traceback (most recent call last):
    toolkit.base.errors.ConfigError: toolkit.current: this process has no run that is open: call toolkit.start() before
    """
    if _open is None or _open.pid != os.getpid():
        raise ConfigError("toolkit.current: this process has no run that is open: call toolkit.start() before")
    return _open


class StartedRun(TrainingRun):
    """A run that its ``with`` block ends, or else the script's end."""

    def __init__(self, config: JobConfig, session: Session, opened: ExitStack) -> None:
        """Take over ``opened``, which closes the session."""
        super().__init__(config, session)
        self.pid = os.getpid()  #: a data worker that is forked has no run
        self._opened_before = opened
        opened.callback(self.close)
        opened.push(self._finish_unless)
        self._script_end = script_end.call_at_end(self._end)
        global _open
        _open = self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._script_end.forget()
        self._end(None if script_end.is_good_exit(error) else error)

    def _end(self, error: BaseException | None) -> None:
        """Finish the run, unless an ``error`` ended it, and close all. A stop becomes the process's exit."""
        global _open
        _open = None
        if isinstance(error, script_end.UnseenExit):
            # What comes after a loop that has reached its end is not the run's, as after a ``with`` block.
            if self.step == self._total:
                error = None
            else:
                log.warning("the script ended before the end of its loop: the run is not marked as completed")
        try:
            self._opened_before.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except StoppedError as stopped:
            error = stopped
        if isinstance(error, StoppedError):
            log.info("%s", error)
            signals.chain_to_previous()
            raise SystemExit(error.exit_code) from None

    def _finish_unless(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()


_open: StartedRun | None = None
