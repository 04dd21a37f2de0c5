"""One attempt, from the start of its ranks to the end of the last one.

Signal handlers, launchers and agents only put events into the queue; the one loop here does all the work.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

from toolkit.base import fsio, logs
from toolkit.base.errors import EXIT_STOPPED, DamagedFileError, StoppedError
from toolkit.base.process_limits import limits
from toolkit.files import records
from toolkit.files.polling import PollTimer
from toolkit.files.run_files import RunProgress, RunResult, RunState
from toolkit.hang import Watchdog
from toolkit.nodes.agent.messages import AgentSignalled, RanksReporting, ScriptRankStatus, StuckConnectionsAnswered
from toolkit.nodes.agent.reports import RankReport
from toolkit.nodes.start.agents import NodeAnswered, Progress
from toolkit.nodes.start.launcher import (
    AllRanksEnded,
    Launcher,
    LaunchFailed,
    NodeFailed,
    RanksExited,
    RanksSucceeded,
    RunningRanks,
    Store,
    StoreHostEnded,
)
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure, StopReason
from toolkit.run.records import user_requests
from toolkit.run.records.ownership import Overtaken
from toolkit.run.records.user_requests import Answer, RequestKind
from toolkit.run.supervise import supervisor_components
from toolkit.run.supervise.node_care import NodeCare
from toolkit.run.supervise.rank_stop import RankStopper, StopAsked, stopped_in_pause
from toolkit.run.supervise.supervisor_components import Context
from toolkit.slurm.network import job_address, wildcard

#: After a SIGKILL only ranks killed at the same moment are awaited: a SIGKILL is no effect of another failure.
KILLED_TOGETHER_S = 0.05
#: Slurm is asked this often whether the job's steps are stopped: where no agent is heard, and where they are.
ASK_STOPPED_EVERY_S, LOOK_STOPPED_EVERY_S = 15.0, 5.0

log = logs.get(__name__)


def run_attempt(context: Context, attempt: Attempt, launcher: Launcher, care: NodeCare) -> None:
    """Start the ranks of ``attempt``, and return when they have ended."""
    plan, number = attempt.plan, attempt.number
    # Each start has its own claim, so that ranks of an earlier one can write no more.
    context.claim.renew()
    context.journal.set_status(RunState.STARTING, attempt)
    hosts = ", ".join(f"{host} x{count}" for host, count in zip(plan.hosts, plan.tasks, strict=True))
    log.info("attempt %d: %d rank%s on %s", number, plan.world_size, "" if plan.world_size == 1 else "s", hosts)
    environ = context.rank_environ(number)
    # The ranks meet at this address, so all their nodes must reach it.
    host = job_address(context.allocation.hosts[0], plan.hosts, environ)
    try:
        store = launcher.start_store(number, plan.world_size, host, environ)
    except StoppedError as stopped:
        log.warning("%s", stopped)
        if not stopped_in_pause(context, attempt, 0.0):  # it was Slurm's signal before the time limit
            attempt.note_stop(StopReason.CLOCK)
        attempt.end(EXIT_STOPPED)
        return
    if host != wildcard():  # else each rank uses the address from which srun started it
        environ["MASTER_ADDR"] = host
    running = launcher.start(number, plan, context.rank_command(), environ, store)
    AttemptLoop(context, attempt, running, store, care).run()


class AttemptLoop:
    """Handles what happens to the ranks of one attempt."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks, store: Store, care: NodeCare) -> None:
        self._context, self._attempt, self._ranks, self._store = context, attempt, ranks, store
        self._care = care
        self._hangs = HangWatch(context, attempt, ranks)
        self._stops = RankStopper(context, attempt, ranks, store)
        self._requests = UserRequestHandler(context, attempt, store, self._hangs)
        self._output = supervisor_components.script_output(context, attempt)
        self._has_stepped = False
        context.poll_timer = PollTimer()
        self._ask_stopped_at = -math.inf  #: when to ask again whether the job is stopped

    def run(self) -> None:
        """Return when all ranks have ended. Raises Overtaken when the run belongs to another job."""
        try:
            self._watch()
        except Overtaken:
            self._ranks.abandon()
            raise
        finally:
            self._hangs.investigation.close()
            self._output.close()
            self._note_printed()
            self._store.close()
        # Late events may still tell why the ranks ended.
        while not self._context.events.empty():
            self._handle(self._context.events.get())

    def _watch(self) -> None:
        """Handle events and the clock until all ranks have ended or are given up: then there is an exit code."""
        attempt, next_status = self._attempt, time.monotonic()
        unkillable_at = math.inf
        while attempt.exit_code is None:
            now = time.monotonic()
            if attempt.kill_at is not None and now >= attempt.kill_at:
                unkillable_at = min(unkillable_at, now + limits().unkillable_s)
                # Again, as Slurm loses a signal for a step that its node has not started yet.
                attempt.note_killed(now + limits().kill_again_s)
                self._ranks.send_signal()
                self._stops.advance_slurm_check(now + limits().dying_s)
            if now >= unkillable_at and self._ranks.tells_each_end:
                self._do_without_unkillable()
                unkillable_at = now + limits().unkillable_s
            # Ranks on dead nodes will never report their end.
            if attempt.killed and attempt.all_reachable_have_ended:
                self._ranks.abandon()
            if now >= next_status:
                self._do_periodic_work()
                next_status = now + limits().status_every_s
            # Wait for the next event, but no longer than until the next status or kill.
            wake = min(next_status, attempt.kill_at or next_status)
            try:
                event = self._context.events.get(timeout=max(0.0, wake - time.monotonic()))
            except Empty:
                continue
            self._handle(event)

    def _do_without_unkillable(self) -> None:
        """Count nodes as lost on which SIGKILL does not end the ranks.

        Where that is so on most nodes, a disk that they share is away. Its return is waited for.
        """
        stuck = self._attempt.hosts_with_ranks - self._attempt.lost_nodes
        if stuck:
            log.error(
                "ranks on %s do not end: SIGKILL was sent at least %.0f s ago",
                ", ".join(sorted(stuck)),
                limits().unkillable_s,
            )
        if 2 * len(stuck) <= len(self._attempt.plan.hosts):
            self._attempt.lose(stuck)

    def _do_periodic_work(self) -> None:
        """Do the work that no event triggers."""
        context, attempt = self._context, self._attempt
        self._wait_while_stopped()
        if context.job.has_answered_late or (context.requeue is not None and context.requeue.is_due):
            context.job.has_answered_late = False
            context.prepare_requeue()
        context.note_usage(attempt)
        self._note_printed()
        if context.poll_timer.is_due((attempt.phase, attempt.stop)):
            self._do_work_on_files()
            printed = attempt.printed
            if not self._has_stepped and (attempt.progress.step or printed.step or printed.loss is not None):
                self._has_stepped = True
                supervisor_components.notify_meanwhile(context.run, context.config)  # it reads the status
        self._stops.watch_the_clock()
        self._hangs.look()
        self._care.dead.look(attempt)
        self._care.look_for_degraded(attempt, self._stops)
        self._stops.leave_the_rest_to_slurm()

    def _note_printed(self) -> None:
        if (printed := self._output.figures()) is not None:
            self._attempt.note_printed(printed)

    def _do_work_on_files(self) -> None:
        """Write the status, and look for what others have written. All runs share the file server: see `PollTimer`."""
        context, attempt = self._context, self._attempt
        # This node may have been cut off, and Slurm has restarted the job elsewhere.
        context.claim.check()
        if context.is_script and not attempt.has_begun:
            with contextlib.suppress(OSError):  # a file server may be away
                if fsio.is_there(context.run.rank_log(attempt.number, 0)):
                    attempt.note_begun()
        if not context.journal.set_status(attempt.phase, attempt) and _is_removed(context.run.path):
            raise Overtaken(f"{context.run.path} was removed: exiting; the ranks end without their supervisor")

    def _wait_while_stopped(self) -> None:
        """Wait while all steps of the job are stopped, by ``scancel --signal=STOP``. This process is in none of them.

        The time counts neither as silence nor as a hang, and no rank is killed in it.
        """
        attempt, agents, began = self._attempt, self._context.agents, time.monotonic()
        if agents is None or not agents.silent_hosts.issuperset(attempt.plan.hosts) or began < self._ask_stopped_at:
            return
        self._ask_stopped_at = began + ASK_STOPPED_EVERY_S
        if not self._context.job.is_stopped():
            return
        log.warning("Slurm has stopped the job's steps: waiting until they continue")
        while self._context.job.is_stopped():
            agents.reset_silence()
            time.sleep(LOOK_STOPPED_EVERY_S)
        attempt.note_pause(time.monotonic() - began)

    def _handle(self, event: Any) -> None:
        attempt = self._attempt
        match event:
            # What the ranks report.
            case RankReport():
                self._take_report(event)
            case RanksReporting(number, host, ranks) if number == attempt.number:
                attempt.note_reported(host, ranks)
            case Progress(host, digest) if digest.attempt == attempt.number:
                self._hangs.watch_reports().on_report(host, digest)
            case ScriptRankStatus() if event.attempt == attempt.number:
                self._hangs.investigation.take_activity(event)
            # Ends and failures: after the first one the other ranks are killed soon.
            case RanksExited():
                self._take_exit(event)
            case RanksSucceeded(ranks):  # a lost node is waited for only while ranks on other nodes are left
                attempt.note_finished(ranks)
            case NodeFailed(host) if host in attempt.plan.hosts:  # else it was asked about in an earlier attempt
                log.error("node %s does not answer: continuing without it", host)
                attempt.lose([host])
                self._kill_soon(KILLED_TOGETHER_S)  # the cause is known
            case LaunchFailed():
                self._take_launch_failed(event)
            case AllRanksEnded(exit_code):
                attempt.end(exit_code)
            case StoreHostEnded(exit_code, memory):
                how = f"the store host ended with exit code {exit_code}; see store.log"
                failure = RankFailure(None, socket.gethostname(), how, time.time(), out_of_memory=memory)
                attempt.fail(failure)
                self._kill_soon(limits().error_reports_s)
            # What agents answer, and signals to this process.
            case NodeAnswered(host, StuckConnectionsAnswered(addresses=addresses)):
                for address in addresses:
                    note_cut_link(self._context, attempt, host, address)
            case AgentSignalled():
                self._stops.take_ranks_signal()
            case RequestsSeen(ids):
                self._requests.pass_on(ids)
            case StopAsked():
                self._stops.take(event)
            # An error in another thread ends the supervisor.
            case Exception():
                raise event

    def _take_report(self, report: RankReport) -> None:
        """Take a report of rank 0. The agent has passed it on unchecked: ignore what does not fit."""
        attempt = self._attempt
        if report.attempt != attempt.number:
            return
        try:
            if report.fields is not None:
                attempt.on_progress(RunProgress.from_json(report.fields))
                if attempt.first_step is not None:
                    self._context.note_ready(attempt)
            if report.result is not None:
                attempt.note_result(RunResult.from_json({**report.result, "state": RunState.COMPLETED}))
        except records.SchemaError as error:
            records.warn_once(f"a report of rank 0 is ignored: {error}")

    def _take_exit(self, ended: RanksExited) -> None:
        attempt = self._attempt
        attempt.note_exited(ended.ranks)
        if ended.with_agent:
            attempt.note_silent(ended.host)
        # A rank that stopped as agreed is no failure.
        if ended.exit_code == EXIT_STOPPED:
            how = f"{ended.how} (that of a stop), but no stop was requested"
            attempt.note_stopped(*(RankFailure(rank, ended.host, how, ended.time) for rank in ended.ranks))
            # A signal at the ranks, or the exit code of the job's own code: then the others wait for this rank.
            if attempt.stop is None:
                self._kill_soon(limits().stop_s)
            return
        if not attempt.killed:
            log.error("rank %s on %s: %s", ",".join(map(str, ended.ranks)), ended.host, ended.how)
        # a rank without any report: the node may lack the interpreter, a library or a mount
        have_not_reported = self._hangs.reports is not None and attempt.heard.keys().isdisjoint(ended.ranks)
        failure_of = partial(
            RankFailure,
            host=ended.host,
            how=ended.how,
            time=ended.time,
            by_signal=ended.signal is not None and not attempt.killed,
            out_of_memory=ended.out_of_memory,
            exit_code=ended.exit_code,
            blames_node=ended.exit_code is not None and not attempt.killed and have_not_reported,
        )
        attempt.fail(*map(failure_of, ended.ranks))
        # An MPI launcher kills the other ranks itself, after the failure of one.
        is_cause = ended.signal == signal.SIGKILL and self._context.config.dist.backend != "mpi"
        self._kill_soon(KILLED_TOGETHER_S if is_cause else limits().error_reports_s)

    def _take_launch_failed(self, failed: LaunchFailed) -> None:
        attempt = self._attempt
        attempt.note_exited(failed.ranks)
        how = f"could not be started: {failed.why}" if failed.ranks else f"the ranks could not be started: {failed.why}"
        if attempt.killed and not any(failure.how == how for failure in attempt.failures):
            return  # the kill came before the launch
        log.error("%s", f"rank {','.join(map(str, failed.ranks))} on {failed.host}: {how}" if failed.ranks else how)
        # What Slurm refuses is no node's fault, and would be refused again.
        if failed.advice:
            words = f"Slurm refuses the step that starts the ranks: {failed.why}; {failed.advice}"
            attempt.fail(RankFailure(None, "", words, time.time(), comes_again=True))
        else:
            host = failed.host or self._context.allocation.hosts[0]
            failure = RankFailure(None, host, how, time.time(), at_launch=True)
            # Without ranks the whole step failed: note one failure without a rank.
            attempt.fail(*(replace(failure, rank=rank) for rank in failed.ranks or [None]))
        self._kill_soon(limits().error_reports_s)

    def _kill_soon(self, wait_s: float) -> None:
        """Kill all ranks soon after one has ended. The others wait in a collective for a peer that will not come.

        Those of a script that was asked to stop may be saving.
        """
        if self._context.is_script and self._attempt.stop not in (None, StopReason.MOVE):
            return
        if self._attempt.kill_at is None and self._context.agents is not None:
            self._context.agents.ask_for_unanswered()
        self._attempt.kill_within(wait_s)


def note_cut_link(context: Context, attempt: Attempt, host: str, address: str) -> None:
    """Note that ``host`` could not connect to ``address``."""
    peer = None if context.agents is None else context.agents.host_at(address)
    if peer is not None:
        attempt.note_cut_link(host, peer)


@dataclass(frozen=True)
class RequestsSeen:
    """The event that requests of users wait for an answer; see `UserRequestHandler`. It comes at each look."""

    ids: tuple[str, ...]


class UserRequestHandler:
    """Passes users' requests on to the agents, which read stacks, or to the ranks, each once in an attempt.

    The ranks agree on the step, as for a stop, and rank 0 reads what is asked for. A request that an earlier attempt or
    supervisor has passed on is passed on again: its files tell whether it is still open.
    """

    def __init__(self, context: Context, attempt: Attempt, store: Store, hangs: HangWatch) -> None:
        self._context, self._attempt, self._store, self._hangs = context, attempt, store, hangs
        self._passed_on: set[str] = set()

    def pass_on(self, ids: Sequence[str]) -> None:
        """Pass on what is new. While the ranks stop, requests wait for the next attempt."""
        if self._attempt.stop is not None or self._attempt.kill_at is not None:
            return
        with contextlib.suppress(OSError):  # they are seen again seconds later
            for request_id in ids:
                if request_id not in self._passed_on:
                    refused = self._pass_on(request_id)
                    self._passed_on.add(request_id)
                    if refused:
                        user_requests.answer(self._context.run, request_id, Answer(refused=refused))

    def _pass_on(self, request_id: str) -> str | None:
        """Pass a request on, if it is still there. Return why it is refused, else None."""
        run, world_size = self._context.run, self._attempt.plan.world_size
        try:
            request = user_requests.read_request(run, request_id)
        except DamagedFileError as error:
            return str(error)
        if request is None:
            return None
        log.info("a user asks for %s", request.wish)
        if request.wish is RequestKind.STACKS:
            self._hangs.investigation.answer(request_id, self._hangs.reports)  # does not wait for them
            return None
        if self._context.is_script:
            why = f"run {run.id} is a script under `toolkit exec`, into whose steps the toolkit cannot look"
            return f"{why}; `toolkit stacks` works"
        if request.wish is RequestKind.PROFILE and request.rank >= world_size:
            return f"run {run.id} has no rank {request.rank}: its ranks are 0 to {world_size - 1}"
        self._store.propose(user_requests.KIND + request_id, by=f"`toolkit {request.wish}`")
        return None


class HangWatch:
    """Watches by the ranks' reports. Where they report nothing, they are watched from outside."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks) -> None:
        self._context, self._attempt = context, attempt
        self.investigation = supervisor_components.hang_investigation(context, attempt, ranks)
        #: None for a script, unless it has called ``toolkit.start()`` and reports
        self.reports: Watchdog | None = None
        if not context.is_script:
            self.watch_reports()

    def watch_reports(self) -> Watchdog:
        """Return what takes the ranks' reports."""
        if self.reports is None:
            self.reports = Watchdog(self._context.config.dist.timeout_s)
        return self.reports

    def look(self) -> None:
        """Kill the ranks if they hang.

        Ranks end a stop that hangs by themselves (``FORCE_AFTER_S`` of `toolkit.ranks.session`), and ranks that are
        being killed need no other reason.
        """
        attempt, agents = self._attempt, self._context.agents
        if attempt.stop not in (None, StopReason.MOVE) or attempt.kill_at is not None:
            return
        reports = self.reports
        if not (self.investigation.is_stuck() if reports is None else reports.is_stuck()):
            return
        # Only of ranks that are stuck: of others it is not known how long they have been still.
        still_s = self.investigation.silence_s() if reports is None else reports.stalled_s
        if still_s is None:  # the investigation has failed
            return
        how = f"no progress for {still_s:.0f} s, dist.timeout_s is {self._context.config.dist.timeout_s}"
        # Ask before the kill, which destroys the evidence.
        if agents is not None:
            agents.ask_for_unanswered()
        log.error("the run hangs: %s; asking the ranks for their stacks", how)
        found: RankFailure | None = self.investigation.find_cause(reports)
        attempt.end_for_hang(found or RankFailure(None, "", how, time.time()))


def _is_removed(folder: Path) -> bool:
    """True if ``folder`` alone is certainly gone. A file server may be away, with or without an error."""
    try:
        folder.stat()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            folder.parent.stat()
            return True
    except OSError:
        pass
    return False
