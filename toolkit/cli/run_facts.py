"""What is known about a run, from its own files: for the page of `toolkit why` and the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.checkpoint.folder import newest_step
from toolkit.cli import columns, run_rows
from toolkit.cli.run_rows import RunRow, given_words, status_rows
from toolkit.files.run_files import AttemptRecord, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.plugins.node_watch import efficiency
from toolkit.plugins.report.why.runs import cause_of
from toolkit.plugins.site import node_history, reservations
from toolkit.run.attempt import advice
from toolkit.run.attempt.error_files import read_error_files
from toolkit.run.attempt.verdict import first_failure
from toolkit.run.job import nodes
from toolkit.run.records import run_config


def facts(run: RunDir, row: RunRow | None = None) -> dict[str, Any]:
    """Return everything that is known. ``row`` is the run's row, if its caller has it and only looks on.

    Without one Slurm is asked about a run that waits or is quiet, and a full disk is looked for.
    """
    attempts, result, status = run.attempts(), run.result(), run.status()
    is_onlooker = row is not None
    # A run can be over without a result of its own. Its row says so, for which Slurm was asked.
    row = row or status_rows([run])[0]
    is_cut_short = row.state in (RunState.STOPPED, RunState.CANCELLED)
    is_over = row.state.startswith("lost") or (result is None and is_cut_short)
    known = status.state if result is None else result.state
    state = row.state if is_over else known or "unknown"
    over = f"job {row.job_id} is over ({row.slurm}) and wrote no result" if is_over and row.slurm else None
    is_waiting = state in (RunState.QUEUED, RunState.REQUEUED)
    # Steps after the newest checkpoint are lost, unless the run completed or still runs.
    last = attempts[-1] if attempts else None
    saved, reached = newest_step(run.checkpoints), None if last is None else last.step_end
    lost = reached - (saved or 0) if reached is not None and state not in (RunState.COMPLETED, RunState.RUNNING) else 0
    found, situation = cause_of(run, may_write=not is_onlooker), advice.situation_of(run, state)
    return {
        "run": f"{run.name}/{run.id}",
        "state": state,
        "why": (result and result.why) or row.why or over or status.why or (last and last.line),
        "waits": _waits_for(run, row) if is_waiting else [],
        "cause": last and last.cause,
        "diagnosis": found and found.to_json(),
        "first_failure": first_failure_of(run, attempts),
        "given": given_words(run),
        "is_script": situation.is_script,
        "loss": columns.loss_remark(
            result.metrics if result is not None and result.metrics else status.progress.metrics
        ),
        "nodes": list(status.nodes),
        "stragglers": run_rows.stragglers(status),
        "using": row.using if isinstance(row.state, RunState) and row.state.has_ranks else "",
        "last_checkpoint": saved,
        "printed": status.printed.to_json(),
        "step_reached": reached,
        "steps_lost": max(0, lost),
        "attempts": attempts,
        "goodput": goodput.of_files(run),
        "start_up": _start_up(attempts, status),
        "efficiency": (result and result.efficiency)
        or efficiency.of_run(run.usage(), attempts, False, status.progress),
        "degraded_nodes": status.degraded_nodes,
        "staging": status.staging,
        "bad_nodes": {host: bad.why for host, bad in nodes.remembered(run).items()},
        "doubtful_nodes": {host: text for host, text in node_history.doubtful_for(run).items() if host in status.nodes},
        "restarts": "" if state == RunState.FAILED else advice.restart_note(run, last.attempt if last else 1),
        "next": columns.hold_reason(row) or advice.next_step(situation),
    }


def _waits_for(run: RunDir, row: RunRow) -> list[str]:
    """Return what a run waits for, with the reservation that Slurm's reason does not name."""
    found = [note for note in columns.notes_of(row) if note != row.why]
    if re.match(r"ReqNodeNotAvail|Reserv", row.reason or "") and (config := run_config.read(run)) is not None:
        found += filter(None, map(reservations.holding_back, config.cluster.component_requests))
    return found


def _start_up(attempts: Sequence[AttemptRecord], status: RunStatus) -> dict[int, Mapping[str, float]]:
    """Return where the start-up time of the first and of the last measured attempt went."""
    known = {attempt.attempt: attempt.start_up for attempt in attempts if attempt.start_up}
    if status.attempt is not None and status.start_up:
        known.setdefault(status.attempt, status.start_up)
    return {number: known[number] for number in sorted({min(known), max(known)})} if known else {}


def first_failure_of(run: RunDir, attempts: Sequence[AttemptRecord]) -> dict[str, Any] | None:
    """Return the first failing rank of the last attempt that failed, with its error and how many failed after it."""
    for attempt in reversed(attempts):
        failure = attempt.first_failure
        if failure is not None:
            reports = read_error_files(run.attempt_logs(attempt.attempt))
            first = first_failure([report for report in reports if report.rank == failure.rank])
            # Its log: the rank's, the store's where no rank failed, or the folder.
            if failure.rank is not None:
                log = run.rank_log(attempt.attempt, failure.rank)
            else:
                log = run.attempt_logs(attempt.attempt)
                if failure.host:
                    log /= "store.log"
            return {
                **failure.to_json(),
                "attempt": attempt.attempt,
                "traceback": first.traceback if first else "",
                "others": sum(report.rank != failure.rank for report in reports),
                "log": str(log),
            }
    return None


def as_data(told: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for a JSON document. Nodes are listed there one by one."""
    attempts: Sequence[AttemptRecord] = told["attempts"]
    used = told["efficiency"] and told["efficiency"].to_json()
    lines = [{**attempt.to_json(), "nodes": attempt.nodes} for attempt in attempts]
    return {**told, "attempts": lines, "efficiency": used}
