"""The supervisor: the one process that owns a run's lifecycle, on the batch host or on this machine.

It starts an attempt (a fresh store, then the ranks), watches it without polling, judges how it ended, writes that down
and restarts, requeues or finishes. Ranks own only training. It imports no torch, so it is up in a fraction of a second.

Signal handlers only put a note into the event queue; everything is done by the one loop in :meth:`Supervisor._watch`.
There is one stop path: whoever wants the ranks to stop, be it a user, a signal or the clock, has the store's agreement
proposed; the ranks commit and exit with 75, and what happens next is judged like any other end.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from toolkit import config as configs
from toolkit import fsio, logs, records, rundir, stacks
from toolkit.agent import progress
from toolkit.agent.progress import Digest, Report, Standing
from toolkit.agent.tether import SIGNALS
from toolkit.cluster import hostlist
from toolkit.cluster.commands import SlurmCommands
from toolkit.cluster.container import Container
from toolkit.cluster.network import job_address, wildcard
from toolkit.config import FOREIGN_JOB, JobConfig
from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEST,
    EXIT_STOPPED,
    ToolkitError,
)
from toolkit.launch import ending, hang, intent, ownership, patience, silence
from toolkit.launch.agents import Agents, NodeAnswered
from toolkit.launch.allocation import Allocation
from toolkit.launch.attempt import Attempt
from toolkit.launch.comeback import Comeback
from toolkit.launch.ending import Budgets, Cause, Decision, Ending, Facts, RankFailure, Stop, judge
from toolkit.launch.error_files import read_error_files
from toolkit.launch.foreign import without_snapshot
from toolkit.launch.goodput import Start
from toolkit.launch.intent import Intent
from toolkit.launch.journal import Journal, write_ended
from toolkit.launch.lookout import Lookout, for_dead_nodes, for_drained_nodes
from toolkit.launch.nodes import Nodes
from toolkit.launch.notify import notify
from toolkit.launch.ownership import Claim, Overtaken
from toolkit.launch.preflight import check_nodes
from toolkit.launch.silence import SilenceWatch
from toolkit.launch.slurm_job import SlurmJob
from toolkit.launch.steps import (
    Events,
    FirstReports,
    Launcher,
    LaunchFailed,
    MainReport,
    NodeFailed,
    Progress,
    RankEnded,
    Step,
    StepEnded,
    Store,
)
from toolkit.launch.store import StoreHostEnded, refuse_too_many_ranks
from toolkit.launch.watchdog import STUCK_SHARE, Watchdog
from toolkit.rundir import RunDir

#: After the first failure the others' error files and srun's lines are awaited this long: they tell the causes apart.
LAST_WORDS_S = 0.5
STATUS_EVERY_S = 0.5
#: Before a restart after an attempt that made no step; twice as long after each further one, up to the second. A file
#: system that is away for some seconds must not use up all restarts, which take but a second.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
KILL_AGAIN_S = 10.0
#: Ranks that got SIGKILL are gone after this long.
DYING_S = 1.0
#: What the verdict may take, at the end of a job, with questions to Slurm and a requeue.
VERDICT_S = 5.0
#: Ranks that were asked to stop and are still there after this long are killed; longer than their own forced exit.
STOP_LIMIT_S = 150.0
#: A run whose steps take longer stays on a node that is drained or sick: its ranks could give the stop up.
LONGEST_STEP_TO_MOVE_S = 30.0
#: So does one that has less than this until it stops for the time limit: the next start comes soon anyway.
LEAST_TIME_TO_MOVE_S = 300.0
#: A foreign script gets this long after SIGTERM.
FOREIGN_STOP_LIMIT_S = 30.0

log = logs.get(__name__)


@dataclass(frozen=True)
class _Signalled:
    number: signal.Signals


class Supervisor:
    """Runs one run to its end. ``launcher``, ``agents`` and ``slurm`` are its outside worlds."""

    def __init__(
        self,
        run: RunDir,
        config: JobConfig,
        allocation: Allocation,
        launcher: Launcher,
        slurm: SlurmCommands | None,
        agents: Agents | None = None,
        container: Container | None = None,
        token: str | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._allocation = allocation
        self._launcher = launcher
        self._agents = agents
        self._slurm = slurm
        self._container = container
        self._token = token
        self._claim: Claim | None = None
        self._foreign = config.job == FOREIGN_JOB
        self._events: Events = SimpleQueue()
        self._job = SlurmJob(slurm, allocation, config.cluster.signal_delay_s)
        self._in_vain = 0  #: attempts in a row that made no step
        self._lookout = None if slurm is None else for_dead_nodes(self._events, slurm.available, self._job.unreachable)
        self._drains: Lookout | None = None
        if slurm is not None and len(allocation.hosts) > 1:  # a job on one node cannot leave it
            self._drains = for_drained_nodes(slurm.drained)
        retry = config.retry
        spare = config.cluster.spare_nodes
        self._nodes = Nodes(run, allocation, spare=spare, allow_fewer=retry.allow_fewer_nodes)
        self._journal = Journal(run, allocation, self._nodes)
        self._comeback: Comeback | None = None
        if slurm is not None:
            self._comeback = Comeback(run, allocation, slurm, self._nodes)

    def run(self, last_words: str | None = None) -> int:
        """Attempts until one finishes or no more may be made; returns the exit code of the job.

        ``last_words`` says what became of the supervisor before this one, if it is known. Raises Overtaken when the run
        belongs to another job.
        """
        self._install_handlers()
        left = None if last_words is None else self._left_running()
        claim = None if left is None else Claim.of_dead(self._run, self._allocation)
        self._claim = claim or Claim.of_job(self._run, self._allocation, self._token)
        self._journal.read()
        if self._has_ended(last_words):
            return EXIT_DONE
        ranks = self._allocation.without(self._config.cluster.spare_nodes).world_size
        refuse_too_many_ranks(ranks)
        if self._slurm is not None:
            _record_size(self._run, self._config, self._allocation)
            _remember_job(self._run, self._allocation)
        patience.persist(self._run.clear_result, self._run.path)
        self._job.look()
        try:
            verdict = None if left is None or claim is None else self._take_over(left)
            verdict = verdict or self._start(last_words)
        finally:
            if self._agents is not None:
                self._agents.close()
        if verdict is None:
            return self._finish_unstarted()
        if self._comeback is not None and verdict.decision is not Decision.REQUEUE:
            self._comeback.dismiss()
        notify(self._run)
        return _exit_code(verdict)

    def _start(self, last_words: str | None) -> Ending | None:
        """Start anew; None for a run that somebody has ended."""
        self._close_left_over_attempt(last_words)
        self._journal.announce()
        if intent.asked(self._run):  # while it waited in the queue, or before Slurm requeued it
            return None
        self._prepare_nodes()
        self._prepare_comeback()
        return self._check_nodes() or self._run_attempts()

    def _prepare_comeback(self) -> None:
        if self._comeback is not None:
            assert self._claim is not None
            self._comeback.prepare(self._job.row, self._job.settings, self._claim)

    def _left_running(self) -> Attempt | None:
        """Return the attempt whose ranks may be there still: a supervisor of this start of our job has died."""
        status, job = self._run.left_over(), self._allocation
        if status is None or status.get("state") not in ("starting", "running", "stopping"):
            return None
        attempt = Attempt.of_status(status, job)
        is_of_this_start = (status.get("job_id"), status.get("restart_count")) == (job.job_id, job.restart_count)
        can_go_on = status.get("stop") in {None, *Stop} - {Stop.MOVE}  # why it left which nodes nobody knows
        if not is_of_this_start or not can_go_on or not {*attempt.plan.hosts} <= {*job.hosts}:
            return None
        attempt.start = Start(**status["start"]) if status.get("start") else None
        attempt.stop = Stop(status["stop"]) if status.get("stop") else None
        return attempt

    def _take_over(self, attempt: Attempt) -> Ending | None:
        """Go on with the ranks of a supervisor that has died, and after them; None where not all are there."""
        environ = self._rank_environ(attempt=0)
        ranks = self._launcher.take_over(attempt.number, attempt.plan, self._rank_command(), environ, self._events)
        if ranks is None:
            assert self._claim is not None
            self._claim.renew()  # what is left of them may write no more
            return None
        log.warning(
            "attempt %d: taken over with all its ranks at step %s", attempt.number, attempt.progress.get("step")
        )
        self._journal.take_over(attempt)
        self._nodes.note_used(attempt.plan)
        self._prepare_comeback()
        if not self._foreign:
            attempt.watchdog = Watchdog(self._config.dist.timeout_s)
        stop, attempt.stop = attempt.stop, None
        if intent.asked(self._run):
            stop = self._why_stop(signal.SIGTERM)
        if stop is not None:  # the ranks may not have been told
            self._ask_to_stop(attempt, *ranks, stop)
        self._follow(attempt, *ranks)
        verdict = self._conclude(attempt)
        return self._run_attempts() if verdict.decision is Decision.RESTART else verdict

    def _run_attempts(self) -> Ending:
        while True:
            verdict = self._run_attempt()
            if verdict.decision is not Decision.RESTART:
                return verdict

    def _has_ended(self, last_words: str | None) -> bool:
        """Whether Slurm has restarted the job of a run that is done or was given up.

        Slurm 24.11 does so after a preemption with grace time: it remembers that the job is to be requeued when it
        ends, our own requeue does not make it forget, and the next end, days later, is taken for that one. A person
        who wants the run to go on says `toolkit resume`, which takes the result away first. A result that cannot be
        read may be that of a run that somebody has cancelled.
        """
        result = self._run.result()
        restarted = self._allocation.restart_count > 0 or last_words is not None
        if not restarted or result is None or result["state"] not in ("completed", "failed", rundir.UNREADABLE):
            return False
        log.info("run %s has ended before (%s): nothing to do in this restart", self._run.id, result["state"])
        self._run.write_status({**self._run.status(), "state": result["state"]})
        return True

    def _install_handlers(self) -> None:
        """Replaces submitit's, which requeue from inside the handler. SimpleQueue.put may interrupt itself safely."""
        for number in SIGNALS:
            signal.signal(number, lambda n, _: self._events.put(_Signalled(signal.Signals(n))))
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _prepare_nodes(self) -> None:
        """Start the agents, which import torch while we look at the rest."""
        plan = self._nodes.plan()
        hosts = () if plan is None else plan.hosts
        environ = self._rank_environ(attempt=0)  # each attempt's order has its own number
        self._launcher.prepare(hosts, self._rank_command(), environ, self._events)

    def _check_nodes(self) -> Ending | None:
        """Preflight: bad nodes are not used. A verdict, recorded, if too few are left; None if the run can start.

        A job that was requeued for it twice, in vain, takes what it gets: it may well run.
        """
        if not self._config.cluster.preflight or self._slurm is None or self._agents is None:
            return None
        job, spare = self._allocation, self._config.cluster.spare_nodes
        checked = replace(job, tasks=(*job.without(spare).tasks, *[0] * spare))
        report = check_nodes(self._run.path, checked, self._agents, self._events)
        if not report.is_fine and self._is_being_ended():
            return None  # what ends us ended the checks, too: they say nothing of the nodes
        for line in report.summary():
            log.log(logging.INFO if report.is_fine else logging.WARNING, "preflight: %s", line)
        if ending.fruitless_requeues(self._journal.history()) >= ending.MAX_FRUITLESS_REQUEUES:
            return None
        dead = self._job.unreachable(report.unknown) if report.unknown else set()
        bad = {**report.bad, **dict.fromkeys(dead, "nothing was heard of it, and its slurmd does not answer")}
        for host, why in bad.items():
            self._nodes.condemn(host, why)
        return None if self._nodes.plan() is not None else self._requeue_for(bad)

    def _is_being_ended(self) -> bool:
        waiting = [self._events.get() for _ in range(self._events.qsize())]
        for event in waiting:  # answers of late nodes may be among them
            self._events.put(event)
        has_signal = any(isinstance(event, _Signalled) for event in waiting)
        return has_signal or self._job.state() not in (ending.Slurm.RUNNING, ending.Slurm.UNKNOWN)

    def _requeue_for(self, bad: Mapping[str, str]) -> Ending:
        attempt = self._new_attempt(self._allocation)
        attempt.lost_nodes, attempt.ended = set(bad), time.time()
        why = "; ".join(f"{host}: {reason}" for host, reason in bad.items())
        verdict = Ending(Cause.NODE_FAILURE, Decision.REQUEUE, f"too few good nodes to start on: {why}")
        self._record(attempt, verdict)
        return verdict

    # -------------------------------------------------------------------------------------------------- one attempt

    def _run_attempt(self) -> Ending:
        plan = self._nodes.plan()
        assert plan is not None, "the verdict before was to restart"
        self._nodes.note_used(plan)
        attempt = self._new_attempt(plan)
        if self._was_told_to_end(attempt):
            attempt.exit_code = EXIT_STOPPED
        else:
            self._run_ranks(attempt)
        return self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> Ending:
        """Judge an attempt whose ranks have ended, and write the verdict down."""
        attempt.ended = time.time()
        self._journal.note_gain(attempt)
        self._read_error_files(attempt)
        self._excuse_nodes(attempt)
        self._look_after_nodes(attempt)
        verdict = self._judge(attempt)
        made_a_step = (attempt.progress.get("step") or 0) > (attempt.progress.get("step_start") or 0)
        self._in_vain = 0 if made_a_step or self._foreign else self._in_vain + 1
        self._record(attempt, verdict)
        if verdict.cause is Cause.MOVED:
            self._give_back(attempt)
        hang.remove_unused(self._run.attempt_logs(attempt.number))  # last: a job that is being ended has but seconds
        return verdict

    def _new_attempt(self, plan: Allocation) -> Attempt:
        start = None if self._foreign else self._journal.begin(self._job.row)
        return Attempt(self._journal.next_number(), time.time(), plan, start)

    def _was_told_to_end(self, attempt: Attempt) -> bool:
        """By a signal that came while there were no ranks: in the preflight, between two attempts, or in the pause."""
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._in_vain - 1), LONGEST_PAUSE_S) if self._in_vain else 0.0
        deadline = time.monotonic() + pause_s
        while attempt.stop is None:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if isinstance(event, _Signalled) and not self._is_slurms_signal(event.number):
                attempt.stop, attempt.stop_asked = self._why_stop(event.number), time.time()
                log.warning("%s: the ranks are not started", event.number.name)
        return attempt.stop is not None

    def _run_ranks(self, attempt: Attempt) -> None:
        plan = attempt.plan
        if not self._foreign:
            attempt.watchdog = Watchdog(self._config.dist.timeout_s)
        assert self._claim is not None
        self._claim.renew()
        self._journal.set_status("starting", attempt)
        log.info("attempt %d: %d ranks on %s", attempt.number, plan.world_size, _hosts_text(plan))
        environ = self._rank_environ(attempt.number)
        host = job_address(self._allocation.hosts[0], plan.hosts, environ)
        store = self._launcher.start_store(attempt.number, plan.world_size, host, environ, self._events)
        if host != wildcard():  # else each rank takes the address from which srun has started it
            environ["MASTER_ADDR"] = host
        step = self._launcher.start(attempt.number, plan, self._rank_command(), environ, self._events, store)
        self._follow(attempt, step, store)

    def _follow(self, attempt: Attempt, step: Step, store: Store) -> None:
        """Watch the ranks until all have ended."""
        try:
            self._watch(attempt, step, store)
        finally:
            if attempt.silence is not None:
                self._note_silence(attempt, attempt.silence)
                attempt.silence.close()
            store.close()
        self._drain(attempt, step, store)

    def _look_after_nodes(self, attempt: Attempt) -> None:
        """Which are lost; a job that Slurm has put back into the queue may have been so for a dead node."""
        if self._foreign or not ending.has_completed(self._facts(attempt)):
            attempt.slurm = self._ask_slurm()
        if self._slurm is not None and attempt.silent_nodes:
            attempt.lost_nodes |= self._job.unreachable(sorted(attempt.silent_nodes))
        if attempt.slurm is ending.Slurm.REQUEUED:
            attempt.lost_nodes |= self._job.unreachable(attempt.plan.hosts) | self._nodes.given_up(attempt.started)
        for host in attempt.lost_nodes:
            self._nodes.condemn(host, f"lost in attempt {attempt.number}")
        for host in ending.unfit_nodes(self._facts(attempt), attempt.rank_hosts):
            self._nodes.condemn(host, f"ranks of attempt {attempt.number} could not be started there")
            attempt.lost_nodes.add(host)

    def _judge(self, attempt: Attempt) -> Ending:
        """A rank that a signal from nowhere killed, or that hung: once is chance, twice is the node.

        An attempt for which a node is put out of use, and which can go on elsewhere, is no fault of the run.
        """
        facts = self._facts(attempt)
        verdict = judge(facts)
        host = verdict.suspect
        if host is None or self._slurm is None:  # without Slurm there is no other node
            return verdict
        count = 1 + sum(past.suspect == host for past in facts.history)
        return judge(replace(facts, condemned=host)) if self._nodes.suspect(host, count) else verdict

    def _rank_command(self) -> list[str]:
        module = ["toolkit.launch.foreign"] if self._foreign else ["toolkit", "run"]
        module.append(str(self._run.config))
        return self._container.command(module) if self._container else [sys.executable, "-P", "-m", *module]

    def _rank_environ(self, attempt: int) -> dict[str, str]:
        """What every rank of ``attempt`` gets; its own numbers are set where it starts."""
        environ = dict(os.environ)
        assert self._claim is not None
        environ.pop(ownership.TOKEN_VARIABLE, None)  # it is not theirs: a rank may submit runs
        environ.pop("MASTER_ADDR", None)  # somebody's profile does not know where our store is
        environ.update(
            {
                rundir.RUN_DIR_VARIABLE: str(self._run.path),
                "TOOLKIT_RUNS": str(self._run.path.parent.parent),
                "TOOLKIT_ATTEMPT": str(attempt),
                rundir.OWNER_VARIABLE: str(self._claim.number),
                "TOOLKIT_SUPERVISED": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
                "PYTHONUNBUFFERED": "1",
            }
        )
        environ.setdefault("OMP_NUM_THREADS", str(self._allocation.cpus_per_task))
        environ.update(hang.debug_environment(self._run.attempt_logs(attempt), environ))
        # what is forked for a foreign script must have been started with the script's own import path
        return without_snapshot(environ, self._run.code) if self._foreign else environ

    def _watch(self, attempt: Attempt, step: Step, store: Store) -> None:
        """Handle events until every rank has ended. The one place where things happen during an attempt."""
        next_status = 0.0
        while attempt.exit_code is None:
            now = time.monotonic()
            if attempt.kill_at is not None and now >= attempt.kill_at:
                attempt.kill_at, attempt.killed = now + KILL_AGAIN_S, True  # the first one may be lost
                step.kill()
                if attempt.leave_at is not None:
                    attempt.leave_at = min(attempt.leave_at, now + DYING_S)
            if attempt.killed and attempt.all_reachable_have_ended:
                step.abandon()
            if now >= next_status:
                self._leave_if_overtaken(step)
                self._journal.set_status(attempt.phase, attempt)
                self._watch_the_clock(attempt, step, store)
                self._watch_for_hangs(attempt, step)
                self._look_for_dead_nodes(attempt)
                self._look_for_ailing_nodes(attempt, step, store)
                self._leave_the_rest_to_slurm(attempt, step)
                next_status = now + STATUS_EVERY_S
            wake = min(next_status, attempt.kill_at or next_status)
            try:
                self._handle(attempt, self._events.get(timeout=max(0.0, wake - time.monotonic())), step, store)
            except Empty:
                continue

    def _leave_if_overtaken(self, step: Step) -> None:
        """Our node was cut off and Slurm has started the job again elsewhere: nothing here is ours to write now."""
        assert self._claim is not None
        if self._claim.holds():
            return
        step.abandon()
        raise Overtaken("a later attempt has taken the run over: leaving; the ranks end when they lose us")

    def _drain(self, attempt: Attempt, step: Step, store: Store) -> None:
        while not self._events.empty():
            self._handle(attempt, self._events.get(), step, store)

    def _handle(self, attempt: Attempt, event: Any, step: Step, store: Store) -> None:
        match event:
            case MainReport(report):
                self._take_report(attempt, report)
            case FirstReports(number, host, ranks) if number == attempt.number:
                attempt.heard |= dict.fromkeys(ranks, host)
            case Progress(host, digest) if digest.attempt == attempt.number:
                if attempt.watchdog is None:  # a script under `toolkit exec` that has called toolkit.start()
                    attempt.watchdog = Watchdog(self._config.dist.timeout_s)
                attempt.watchdog.hear(host, digest)
            case RankEnded():
                self._take_rank_ended(attempt, event)
            case NodeFailed(host) if host in attempt.plan.hosts:  # else it was asked in the attempt before
                log.error("node %s does not answer: going on without it", host)
                attempt.lost_nodes.add(host)
                self._kill_soon(attempt)
            case LaunchFailed():
                self._take_launch_failed(attempt, event)
            case StepEnded(exit_code):
                attempt.exit_code = exit_code
            case StoreHostEnded(exit_code):
                how = f"the store host ended with exit code {exit_code}; see store.log"
                attempt.failures.append(RankFailure(None, socket.gethostname(), how, time.time()))
                self._kill_soon(attempt)
            case NodeAnswered(host, {"addresses": addresses}):
                for address in addresses:
                    self._note_cut_link(attempt, host, address)
            case _Signalled(number):
                self._take_signal(attempt, number, step, store)
            case Exception():
                raise event

    @staticmethod
    def _take_report(attempt: Attempt, report: Report) -> None:
        """Take what rank 0 says. The agent has passed it on as it came: what does not fit is not taken."""
        if report.attempt != attempt.number:
            return
        try:
            if report.fields is not None:
                attempt.hear_progress(records.fit(report.fields, rundir.PROGRESS))
            if report.result is not None:
                attempt.result = records.fit(report.result, rundir.REACHED)
        except records.Misfit as misfit:
            records.note(f"a report of rank 0 is ignored: {misfit}", None)

    def _take_rank_ended(self, attempt: Attempt, ended: RankEnded) -> None:
        attempt.note_gone(ended.ranks)
        if ended.with_agent:
            attempt.silent_nodes.add(ended.host)
        if ended.exit_code == EXIT_STOPPED:
            attempt.stopped |= set(ended.ranks)
            return
        is_dispensable = not ended.with_agent and attempt.can_do_without(ended.ranks)
        if not attempt.killed and ended.exit_code != EXIT_REQUEST and is_dispensable:
            log.warning("rank %s on %s: %s; the run goes on without it", _names(ended.ranks), ended.host, ended.how)
            attempt.lost_ranks |= dict.fromkeys(ended.ranks, ended.how)
            return
        if not attempt.killed:
            log.error("rank %s on %s: %s", _names(ended.ranks), ended.host, ended.how)
        failure = RankFailure(
            None,
            ended.host,
            ended.how,
            ended.time,
            by_signal=ended.signal is not None and not attempt.killed,
            out_of_memory=ended.out_of_memory,
            blames_node=ended.exit_code is not None and not attempt.killed and self._is_mute(attempt, ended.ranks),
        )
        attempt.failures += [replace(failure, rank=rank) for rank in ended.ranks]
        self._kill_soon(attempt)

    @staticmethod
    def _is_mute(attempt: Attempt, ranks: Sequence[int]) -> bool:
        """True if none of ``ranks`` has ever reported: the node may lack the interpreter, a library or a mount."""
        return attempt.watchdog is not None and attempt.heard.keys().isdisjoint(ranks)

    def _take_launch_failed(self, attempt: Attempt, failed: LaunchFailed) -> None:
        attempt.note_gone(failed.ranks)
        how = f"could not be started: {failed.why}" if failed.ranks else f"the ranks could not be started: {failed.why}"
        if attempt.killed and not any(failure.how == how for failure in attempt.failures):
            return  # the kill came between
        log.error("%s", f"rank {_names(failed.ranks)} on {failed.host}: {how}" if failed.ranks else how)
        failure = RankFailure(None, failed.host or self._allocation.hosts[0], how, time.time(), at_launch=True)
        attempt.failures += [replace(failure, rank=rank) for rank in failed.ranks or [None]]
        self._kill_soon(attempt)

    def _kill_soon(self, attempt: Attempt) -> None:
        """One rank's end is every rank's: the others wait in a collective for a peer that will not come."""
        if not attempt.killed:
            if attempt.kill_at is None and self._agents is not None:
                self._agents.ask_for_unanswered()
            soon = time.monotonic() + LAST_WORDS_S
            attempt.kill_at = min(attempt.kill_at or soon, soon)

    def _note_cut_link(self, attempt: Attempt, host: str, address: str) -> None:
        """Note that ``host`` could not connect to ``address``, if that is another node of the attempt."""
        peer = None if self._agents is None else self._agents.host_at(address)
        if peer is not None and peer != host and {host, peer} <= {*attempt.plan.hosts}:
            attempt.cut_links.add((host, peer))

    def _look_for_dead_nodes(self, attempt: Attempt) -> None:
        """Where another node could take over; else Slurm requeues the job, and a network that is away comes back."""
        if self._lookout is not None and self._agents is not None and not attempt.killed and self._nodes.can_lose_one:
            self._lookout.look(self._agents.silent_hosts & {*attempt.plan.hosts[1:]} - attempt.lost_nodes)

    def _look_for_ailing_nodes(self, attempt: Attempt, step: Step, store: Store) -> None:
        """Ask the ranks to stop where good spares can replace nodes that are drained or sick. No step is lost by it."""
        if self._agents is None:
            return
        drained: Mapping[str, str] = {}
        if self._drains is not None:
            self._drains.look(self._allocation.hosts)
            drained = self._drains.found
        self._nodes.note(sick=self._agents.sick_hosts, drained=drained)
        leaving = self._nodes.to_leave(attempt.plan.hosts, self._agents.heard_hosts)
        if not leaving or not self._may_move(attempt):
            return
        log.warning("spares are to replace %s: asking the ranks to stop", ", ".join(leaving))
        attempt.left_nodes = leaving
        for host, bad in leaving.items():
            self._nodes.condemn(host, bad.why, is_drained=bad.is_drained)
        self._ask_to_stop(attempt, step, store, Stop.MOVE)

    def _may_move(self, attempt: Attempt) -> bool:
        """Whether a stop now would save every step, and the job goes on long enough to be worth it."""
        is_ending = attempt.stop is not None or attempt.kill_at is not None or attempt.exit_code is not None
        step_s = attempt.mean_step_s
        if is_ending or self._foreign or step_s is None or step_s > LONGEST_STEP_TO_MOVE_S:
            return False
        return not self._job.is_nearly_over(attempt.save_s, LEAST_TIME_TO_MOVE_S)

    def _give_back(self, attempt: Attempt) -> None:
        """Give the drained nodes that were left back to Slurm: whoever drained them waits until no job is there."""
        drained = {host for host, bad in attempt.left_nodes.items() if bad.is_drained}
        slurm, row = self._slurm, self._job.show() if drained else None
        if slurm is None or row is None or self._agents is None:
            return
        for host in drained:
            self._agents.dismiss(host)
        keep = hostlist.compress([host for host in hostlist.expand(row.node_list) if host not in drained])
        give_back = partial(slurm.release_nodes, row.requeue_id, keep=keep)
        patience.ask(give_back, f"{', '.join(sorted(drained))} cannot be given back", patience_s=0.0)

    def _watch_for_hangs(self, attempt: Attempt, step: Step) -> None:
        """A stop that hangs is the ranks' to end (FORCE_AFTER_S), and what is being killed needs no other reason."""
        if attempt.stop not in (None, Stop.MOVE) or attempt.kill_at is not None:
            return
        dog = attempt.watchdog or self._watch_from_outside(attempt)
        if dog is None or not dog.is_stuck():
            return
        timeout_s = self._config.dist.timeout_s
        log.error(
            "no progress for %.0f s, dist.timeout_s is %d: asking the ranks for their stacks", dog.still_s, timeout_s
        )
        assert self._agents is not None
        self._agents.ask_for_unanswered()
        known: Mapping[str, Digest] = {} if isinstance(dog, SilenceWatch) else dog.nodes
        ranks = self._ask_for_stacks(attempt, dog, step)
        groups = hang.look(self._agents, self._run, attempt.number, ranks, known)
        attempt.hang = hang.investigate(groups, attempt.rank_hosts, self._run, attempt.number)
        attempt.kill_at = time.monotonic()

    @staticmethod
    def _ask_for_stacks(attempt: Attempt, dog: Watchdog | SilenceWatch, step: Step) -> dict[str, list[Standing]]:
        """Have the ranks write their stacks; return, by host, what is known here of those in question."""
        if isinstance(dog, SilenceWatch):
            standings = dog.standings()
            dog.ask_for_stacks()
        else:
            log.info("all ranks together: %s", progress.merge(dog.nodes.values()))
            standings = [Standing(rank, None, None, dog.still_s, False) for rank in range(attempt.plan.world_size)]
            step.kill(stacks.ASK)
        by_host: dict[str, list[Standing]] = {}
        for standing in standings:
            if standing.rank not in attempt.lost_ranks:
                by_host.setdefault(attempt.host_of(standing.rank), []).append(standing)
        return by_host

    @staticmethod
    def _note_silence(attempt: Attempt, watch: SilenceWatch) -> None:
        """Name silent ranks of an attempt that failed: others may have waited for them, in NCCL until it gave up."""
        silent = watch.standings()
        if silent and attempt.failures and attempt.hang is None:
            still_s = min(standing.still_s for standing in silent)
            log.warning("silent for %.0f s or longer before: rank %s", still_s, _names([s.rank for s in silent]))

    def _watch_from_outside(self, attempt: Attempt) -> SilenceWatch | None:
        """The watch of a script that has not reported anything; None until it has had time to."""
        bound_s = STUCK_SHARE * self._config.dist.timeout_s
        late = time.time() - attempt.started > silence.START_AFTER_SHARE * bound_s
        if attempt.silence is None and late:
            environ = self._rank_environ(attempt.number)
            attempt.silence = silence.start_watch(self._run, attempt.number, attempt.plan, environ, bound_s)
        return attempt.silence

    # ----------------------------------------------------------------------------------------------- the stop path

    def _take_signal(self, attempt: Attempt, number: signal.Signals, step: Step, store: Store) -> None:
        if self._is_slurms_signal(number):
            return
        log.warning("%s: asking the ranks to stop", number.name)
        if number is signal.SIGTERM and self._slurm is not None:
            wait_s = self._job.settings.kill_wait_s
            attempt.leave_at = time.monotonic() + max(wait_s / 2, wait_s - VERDICT_S)
        self._ask_to_stop(attempt, step, store, self._why_stop(number))

    def _leave_the_rest_to_slurm(self, attempt: Attempt, step: Step) -> None:
        """KillWait after it has told a job to end Slurm kills all that is left of it: this process, too, whose verdict
        nobody would ever read. (A rank whose SIGTERM came between fork and exec lives, and srun waits for it.)"""
        if attempt.leave_at is None or time.monotonic() < attempt.leave_at:
            return
        attempt.leave_at = None
        if self._job.is_being_ended():
            log.warning("Slurm ends the job: not waiting for its ranks any longer")
            attempt.stopped.clear()  # whether the others have committed, too, nobody will say
            step.abandon()

    def _why_stop(self, number: signal.Signals) -> Stop:
        wanted = intent.asked(self._run)
        if wanted is Intent.CANCEL:
            return Stop.CANCEL
        if wanted is Intent.STOP or number is signal.SIGINT or self._allocation.job_id is None:
            return Stop.USER
        return Stop.SIGNAL

    def _is_slurms_signal(self, number: signal.Signals) -> bool:
        """Whether this is no wish of anybody's: we watch the clock ourselves."""
        return not intent.asked(self._run) and self._job.is_its_signal(number)

    def _ask_to_stop(self, attempt: Attempt, step: Step, store: Store, stop: Stop) -> None:
        """Asking twice changes nothing, but a person's wish overrides what was asked before, and everything a move."""
        if stop is Stop.CANCEL and self._allocation.job_id is None:
            attempt.kill_at = time.monotonic()
        if attempt.stop not in (None, Stop.MOVE):
            attempt.stop = stop if stop in (Stop.CANCEL, Stop.USER) else attempt.stop
            return
        attempt.stop, attempt.stop_asked = stop, time.time()
        self._journal.set_status("stopping", attempt)  # now: if we are killed before we can say more, this tells why
        if attempt.exit_code is not None:  # they have ended, and the store with them; the verdict still needs to know
            return
        limit_s = STOP_LIMIT_S
        if self._foreign:
            step.kill(signal.SIGTERM)
            limit_s = FOREIGN_STOP_LIMIT_S
        else:
            store.propose("stop", by=f"the supervisor ({stop})")
        if stop is not Stop.MOVE:  # a move has time for the longest save; what hangs is noticed as in training
            attempt.kill_at = attempt.kill_at or time.monotonic() + limit_s

    def _watch_the_clock(self, attempt: Attempt, step: Step, store: Store) -> None:
        """Stop in time before the limit, without any signal configured."""
        if attempt.stop is None and self._job.is_nearly_over_still(attempt.save_s):
            log.warning("the time limit is near: asking the ranks to stop")
            self._ask_to_stop(attempt, step, store, Stop.CLOCK)

    # ------------------------------------------------------------------------------------------------------ judging

    def _read_error_files(self, attempt: Attempt) -> None:
        """What failing ranks wrote about themselves: more telling than an exit code, and timed at its cause."""
        told: dict[int, RankFailure] = {}
        hosts = attempt.rank_hosts
        for failure in read_error_files(self._run.attempt_logs(attempt.number)):
            rank = failure.rank
            assert rank is not None
            if rank in attempt.lost_ranks or rank >= len(hosts):
                continue
            # torch's format has no host
            told[rank] = replace(failure, host=hosts[rank]) if failure.host == "?" else failure
            if failure.unreached is not None:
                self._note_cut_link(attempt, hosts[rank], failure.unreached)
        kept = [failure for failure in attempt.failures if failure.rank not in told or failure.by_signal]
        attempt.failures = [*kept, *told.values()]

    @staticmethod
    def _excuse_nodes(attempt: Attempt) -> None:
        """Blame no node for ranks that ended before their first report where the ranks of most nodes did so."""
        mute = {failure.host for failure in attempt.failures if failure.blames_node and not failure.traceback}
        if len(mute) > len({*attempt.rank_hosts}) / 2:
            attempt.failures = [replace(f, blames_node=f.blames_node and bool(f.traceback)) for f in attempt.failures]

    def _facts(self, attempt: Attempt) -> Facts:
        assert attempt.exit_code is not None
        retry = self._config.retry
        return Facts(
            exit_code=attempt.exit_code,
            failures=tuple(attempt.failures),
            stopped_cleanly=bool(attempt.stopped) and not attempt.failures and not attempt.lost_nodes,
            stop=attempt.stop,
            left_nodes=tuple(f"{host}: {bad.why}" for host, bad in attempt.left_nodes.items()),
            slurm=attempt.slurm,
            lost_nodes=tuple(sorted(attempt.lost_nodes)),
            can_go_on=self._nodes.plan() is not None,
            has_result=attempt.result is not None,
            lost_ranks=bool(attempt.lost_ranks),
            hang=attempt.hang,
            cut_links=tuple(sorted(attempt.cut_links)),
            hosts=attempt.plan.hosts,
            step_start=attempt.progress.get("step_start"),
            step_end=attempt.progress.get("step"),
            step_saved=attempt.step_saved,
            gained_s=attempt.gained_s,
            lost_s=attempt.lost_s,
            is_foreign=self._foreign,
            history=self._journal.history(),
            budgets=Budgets(retry.max_failures, retry.max_requeues, retry.no_progress_attempts),
        )

    def _ask_slurm(self) -> ending.Slurm:
        """How Slurm sees our job at this moment. A cancelled run is cancelled whatever Slurm says."""
        if intent.asked(self._run) is Intent.CANCEL:
            return ending.Slurm.CANCELLED
        return self._job.state(patience.PATIENCE_S)

    # ---------------------------------------------------------------------------------------------------- recording

    def _record(self, attempt: Attempt, verdict: Ending) -> None:
        log.info("attempt %d: %s (%s): %s", attempt.number, verdict.cause, verdict.decision, verdict.line)
        patience.persist(lambda: self._journal.add(attempt, verdict), self._run.path)
        if verdict.decision is Decision.RESTART:
            self._journal.set_status("restarting", attempt, why=verdict.line)
            return
        state, why = _state(verdict), verdict.line
        self._journal.set_status(state, attempt, why=why, ended=time.time())
        if verdict.decision is Decision.REQUEUE:
            seen = ending.Slurm.UNKNOWN if self._comeback is None else self._comeback.requeue()
            if seen is ending.Slurm.REQUEUED:
                return
            state, why = self._why_it_stays(seen, why)
            self._journal.set_status(state, attempt, why=why, ended=time.time())
        patience.persist(lambda: self._journal.write_result(attempt, state, why), self._run.path)

    def _why_it_stays(self, seen: ending.Slurm, why: str) -> tuple[str, str]:
        """State and reason of a run that was to be requeued and is not."""
        if seen is ending.Slurm.CANCELLED:
            return self._state_asked_for(), f"{why}; cancelled before it was requeued"
        return "stopped", f"{why}; but Slurm did not take it back: `toolkit resume` goes on with it"

    def _state_asked_for(self) -> str:
        return "stopped" if intent.asked(self._run) is Intent.STOP else "cancelled"

    def _finish_unstarted(self) -> int:
        state = self._state_asked_for()
        code = EXIT_STOPPED if state == "stopped" else EXIT_FAILED
        why = f"{state} before it started again"
        patience.persist(lambda: write_ended(self._run, state, why), self._run.path)
        notify(self._run)
        return code

    def _close_left_over_attempt(self, last_words: str | None) -> None:
        """An attempt whose supervisor could not say goodbye gets its line now; a preempted one would have had TERM."""
        status = self._run.left_over()
        if status is None:
            return
        left = Attempt.of_status(status, self._allocation)
        gone = self._job.unreachable(left.plan.hosts) if self._slurm else set()
        left.lost_nodes = lost = gone | self._nodes.given_up(left.started)  # which may be back
        decision = Decision.REQUEUE
        if last_words is not None:
            cause, why, decision = Cause.CRASHED, last_words, Decision.RESTART
        elif lost:
            cause, why = Cause.NODE_FAILURE, f"lost {', '.join(sorted(lost))}"
        elif status.get("stop") not in (None, Stop.MOVE) or self._job.was_preempted(status.get("job_id")):
            cause, why = Cause.PREEMPTED, "taken away before its supervisor could say how it ended"
        else:
            cause, why = Cause.NODE_FAILURE, "ended without a word: a node failure, a power cut, or SIGKILL"
        log.warning("attempt %d: %s", left.number, why)
        for host in gone:
            self._nodes.condemn(host, why)
        left.left_over, left.ended = status, status.get("updated", time.time())
        self._journal.note_gain(left)
        patience.persist(lambda: self._journal.add(left, Ending(cause, decision, why)), self._run.path)
        in_vain, limit = ending.requeues_in_vain(self._journal.history()), self._config.retry.max_requeues
        if in_vain > limit:
            raise ToolkitError(f"{why}; given up after {in_vain - 1} requeues without a new checkpoint")


def _names(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _hosts_text(plan: Allocation) -> str:
    return ", ".join(f"{host} x{count}" for host, count in zip(plan.hosts, plan.tasks, strict=True))


def _state(verdict: Ending) -> str:
    """The run's state after a verdict that ends the job."""
    if verdict.decision is Decision.REQUEUE:
        return "requeued"
    if verdict.cause in (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED):
        return verdict.cause.value
    return "failed"


def _exit_code(verdict: Ending) -> int:
    if verdict.cause is Cause.COMPLETED:
        return EXIT_DONE
    return EXIT_FAILED if verdict.decision is Decision.GIVE_UP else EXIT_STOPPED


def _record_size(run: RunDir, config: JobConfig, allocation: Allocation) -> None:
    """Write the allocation's size into the run's config."""
    cluster = config.cluster
    used = allocation.without(cluster.spare_nodes)
    if config.job != FOREIGN_JOB and not configs.is_loop(config.job, run.code):
        configs.check_batch(config, used.world_size)
    cluster.nodes = len(used.hosts)
    cluster.tasks_per_node = max(allocation.tasks)
    cluster.cpus_per_task = allocation.cpus_per_task
    cluster.gpus_per_node = allocation.gpus_per_node
    patience.persist(lambda: fsio.write_atomic(run.config, configs.dump_config(config)), run.config)


def _remember_job(run: RunDir, allocation: Allocation) -> None:
    """Write down which run the job serves: an sbatch script that Slurm starts again knows no more than its job id."""
    key = allocation.job_key
    if key is not None:
        patience.persist(lambda: rundir.remember_job(run, key), run.path)
