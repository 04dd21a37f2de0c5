"""Start the agents of a job: on this machine, or by srun steps."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from toolkit.devices import kinds
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Endpoint, OnFailure
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.launcher import LaunchFailed, NodeFailed, RanksExited
from toolkit.nodes.start.srun import Srun, SrunEvent
from toolkit.slurm.srun_commands import SrunStep

#: Of srun for each step of agents.
_OPTIONS = ("--cpu-bind=none", "--no-kill", "--label")


class LocalAgent:
    """An agent on this machine, which dies with this process: an :class:`~.agents.AgentStarter`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        (host,) = hosts
        log_path = self._run.logs / f"agent-{host}.log"
        with open_log(log_path) as output:
            process = start_child(
                _command(self._run, at, host),
                environ,
                end_by=signal.SIGKILL,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

        # Its end is reported at once, before or after it has connected.
        def wait() -> None:
            code = process.wait()
            on_failure(hosts, f"its agent ended with exit code {code}: see {log_path}")

        threading.Thread(target=wait, daemon=True).start()

    def note_connected(self, host: str) -> None:
        """Do nothing: the end of the process is noticed in any case."""

    def close(self) -> None:
        for process in self._processes:
            process.kill()


class SrunAgents:
    """An :class:`~.agents.AgentStarter`: the agents are one srun step for all nodes of a component with as many GPUs.

    A step has all resources of the job on its nodes. Its srun is killed, without notice to the step, as soon as all
    its agents have connected. When a batch host comes back just as Slurm has given it up, its slurmd ends the job's
    processes there. An srun among them would take the step with it, and no process would be left to requeue the job
    (seen on 24.11: it stayed RUNNING for ever).
    """

    def __init__(self, run: RunDir, allocation: Allocation, options: Sequence[str] = ()) -> None:
        self._run, self._allocation, self._options = run, allocation, options
        self._sruns: list[tuple[Srun, set[str]]] = []  #: with the hosts whose agents have not connected
        # A step that was refused is tried again by a thread, while others are started: each needs a file of its own.
        self._numbers = itertools.count()

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        for group in self._allocation.step_groups(hosts):
            self._start(group, at, environ, on_failure, self._allocation.gres(group))

    def _start(
        self,
        hosts: Sequence[str],
        at: Endpoint,
        environ: Mapping[str, str],
        on_failure: OnFailure,
        gres: str | None,
        *gpus: str,
    ) -> threading.Thread:
        """Start one step; return the thread that waits for its end. ``gpus`` is another option to ask for GPUs."""
        if "OMP_NUM_THREADS" not in os.environ:  # a zygote reads it, before it knows its ranks
            environ = {**environ, "OMP_NUM_THREADS": str(self._allocation.cpus_of[hosts[0]])}
        if self._allocation.gpus_per_node:  # Slurm names a step's own GPUs, but only on nodes that have any
            environ = {name: value for name, value in environ.items() if name not in kinds.HIDING}
        plan = SrunStep(
            command=_command(self._run, at),
            hosts=hosts,
            cpus_per_task=None,
            output=None,
            name=f"{self._run.id}.agents",
            mpi="none",
            gres=gres,
            extra=[*_OPTIONS, *self._options, *self._allocation.step_options(hosts), *gpus],
            overlap=True,
        )
        # Since 24.11 a site may have a whole step killed with one process that runs out of memory: all agents, that is.
        host_file = self._run.logs / f"agents-{next(self._numbers)}.hosts"
        srun = Srun(plan, {**environ, "SLURM_OOM_KILL_STEP": "0"}, host_file)
        self._sruns.append((srun, {*hosts}))

        refusals: list[LaunchFailed] = []

        def take(event: SrunEvent) -> None:
            if isinstance(event, LaunchFailed) and event.advice and not gpus and self._allocation.is_uneven:
                refusals.append(event)
                return
            match event:
                case LaunchFailed(_, None, why):
                    on_failure(hosts, why, is_certain=False)  # the failing node is unknown
                case LaunchFailed(_, str(host), why):
                    on_failure([host], why)
                case RanksExited():
                    why = f"its agent: {event.how}; see agent-{event.host}.log"
                    on_failure([event.host], why, is_certain=event.signal is None)  # srun kills all if one cannot start
                case NodeFailed(host):  # a dead node ends no connection
                    on_failure([host], "Slurm has given the node up")

        def wait() -> None:
            code = srun.wait(take)
            # Slurm 22.05 compares a step's --gres with the numbers of other nodes, and later versions let a step with
            # --gpus wait for ever. So that is the second try, on each node alone.
            if refusals and not srun.given_up.is_set():
                gres = self._allocation.other_gres_on(hosts)
                counts = {host: f"--gpus={self._allocation.gpus_of[host]}" for host in hosts}
                alone = [self._start([host], at, environ, on_failure, gres, count) for host, count in counts.items()]
                # The kernel ends a child with the thread that has started it, see die_with_parent.
                for thread in alone:
                    thread.join()
                return
            on_failure(hosts, f"the agents' srun ended with exit code {code}", is_certain=False)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    def note_connected(self, host: str) -> None:
        for srun, missing in self._sruns:
            if host in missing:
                missing.remove(host)
                # The srun has done its work, see the class.
                if not missing:
                    srun.kill_client()

    def close(self) -> None:
        """End the sruns. The agents have left; srun must end no step by number."""
        for srun, _ in self._sruns:
            srun.kill_client()


def _command(run: RunDir, at: Endpoint, *host: str) -> list[str]:
    module = [sys.executable, "-P", "-m", "toolkit.nodes.agent.node"]
    return [*module, str(at.secret_file), str(run.logs), at.address, str(at.port), str(at.start), *host]
