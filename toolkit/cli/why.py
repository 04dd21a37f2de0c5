"""`toolkit why RUN`: one page about a run's state or end, from its own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import tracebacks
from toolkit.checkpoint.folder import newest_step
from toolkit.cli import cause, slow
from toolkit.cli.show import given_words, loss_remark, status_rows, table
from toolkit.metrics import efficiency, goodput, start_up
from toolkit.run.attempt import advice
from toolkit.run.attempt.error_files import read_error_files
from toolkit.run.attempt.facts import Cause, first_failure
from toolkit.run.job import node_history, nodes
from toolkit.run.records import after, changes
from toolkit.run_files import AttemptRecord, RunState, RunStatus
from toolkit.rundir import RunDir
from toolkit.why.runs import cause_of

#: The number of last lines of a folded traceback that are shown; the whole one is in the rank's log.
TRACEBACK_LINES = 25


def facts(run: RunDir) -> dict[str, Any]:
    """Return everything on the page."""
    damage: list[str] = []
    attempts, result, status = run.attempts(damage), run.result(damage), run.status(damage)
    # A run can be over without a result of its own. Its row says so, for which Slurm was asked.
    row = status_rows([run])[0]
    is_cut_short = row["state"] in (RunState.STOPPED, RunState.CANCELLED)
    is_over = row["state"].startswith("lost") or (result is None and is_cut_short)
    known = status.state if result is None else result.state
    state = row["state"] if is_over else known or "unknown"
    over = f"job {row['job_id']} is over ({row['slurm']}) and wrote no result" if is_over and row["slurm"] else None
    waits_for = after.sentence(row["after"]) or None
    # Steps after the newest checkpoint are lost, unless the run completed or still goes on.
    last = attempts[-1] if attempts else None
    saved, reached = newest_step(run.checkpoints), None if last is None else last.step_end
    lost = reached - (saved or 0) if reached is not None and state not in (RunState.COMPLETED, RunState.RUNNING) else 0
    found, situation = cause_of(run), advice.situation_of(run, state)
    return {
        "run": f"{run.name}/{run.id}",
        "state": state,
        "why": (result and result.why) or row["why"] or over or status.why or (last and last.line) or waits_for,
        "cause": last and last.cause,
        "diagnosis": found and found.to_json(),
        "first_failure": _first_failure(run, attempts, damage),
        "given": given_words(run),
        "is_script": situation.is_script,
        "loss": loss_remark(result.metrics if result is not None and result.metrics else status.progress.metrics),
        "nodes": list(status.nodes),
        "stragglers": slow.stragglers(status),
        "last_checkpoint": saved,
        "step_reached": reached,
        "steps_lost": max(0, lost),
        "attempts": attempts,
        "goodput": goodput.of_files(run, damage),
        "start_up": _start_up(attempts, status),
        "efficiency": efficiency.of_files(run, damage),
        "ailing_nodes": status.ailing_nodes,
        "staging": status.staging,
        "bad_nodes": {host: bad.why for host, bad in nodes.remembered(run, damage).items()},
        "changes": row["changes"],
        "doubtful_nodes": {host: text for host, text in node_history.doubtful_for(run).items() if host in status.nodes},
        "damage": list(dict.fromkeys([*row["damage"], *damage])),
        "restarts": "" if state == RunState.FAILED else advice.of_restarts(run, last.attempt if last else 1),
        "next": advice.next_step(situation),
    }


def _start_up(attempts: Sequence[AttemptRecord], status: RunStatus) -> dict[int, Mapping[str, float]]:
    """Return where the start-up time of the first and of the last measured attempt went."""
    known = {attempt.attempt: attempt.start_up for attempt in attempts if attempt.start_up}
    if status.attempt is not None and status.start_up:
        known.setdefault(status.attempt, status.start_up)
    return {number: known[number] for number in sorted({min(known), max(known)})} if known else {}


def _first_failure(run: RunDir, attempts: Sequence[AttemptRecord], damage: list[str]) -> dict[str, Any] | None:
    """Return the first failing rank of the last attempt that failed.

    With it come its error, and how many ranks failed after it.
    """
    for attempt in reversed(attempts):
        failure = attempt.first_failure
        if failure is not None:
            reports = read_error_files(run.attempt_logs(attempt.attempt), damage)
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


def page(told: dict[str, Any]) -> str:
    """Return the facts as text."""
    waits = "not started yet" if told["state"] in ("unknown", RunState.QUEUED) else ""
    lines = [f"{told['run']}: {told['state']}", *cause.wrapped("  ", told["why"] or waits, "  "), ""]
    lines += _failure_lines(told["first_failure"])
    lines += _cause_lines(told["diagnosis"], told["first_failure"])
    # Sentences, which are wrapped together below.
    prose = [text for text in (told["given"], told["restarts"], told["loss"]) if text]
    prose += slow.lines(told["stragglers"], told["nodes"])
    saved = told["last_checkpoint"]
    if saved is not None or not told["is_script"]:  # a script has checkpoints of its own
        prose.append(f"last checkpoint: {'none' if saved is None else f'step {saved}'}")
    if told["step_reached"] is not None:
        prose.append(f"steps lost: {told['steps_lost']} (reached step {told['step_reached']})")
    if time_told := goodput.sentence(told["goodput"]):
        prose.append(f"time: {time_told}")
    prose += [f"start of attempt {number}: {start_up.sentence(parts)}" for number, parts in told["start_up"].items()]
    prose += changes.lines(told["changes"])
    prose += [f"staging: {line}" for line in told["staging"]]
    prose += [f"bad node: {host} ({why})" for host, why in told["bad_nodes"].items()]
    prose += [f"node {host}: {what}" for host, what in told["ailing_nodes"].items()]
    prose += [f"node {host} {what}" for host, what in told["doubtful_nodes"].items()]
    attempts: Sequence[AttemptRecord] = told["attempts"]
    # No failure above explains why a run was moved.
    prose += [f"attempt {a.attempt}: {a.line}" for a in attempts if a.cause == Cause.MOVED]
    prose += [f"damaged: {what}" for what in told["damage"]]
    lines += [part for line in prose for part in cause.wrapped("", line)]
    if attempts:
        lines += ["", table(_attempt_rows(attempts[-12:]))]
    if used := efficiency.lines(told["efficiency"]):
        lines += ["", *used]
    return "\n".join([*lines, "", *cause.wrapped("next: ", told["next"])])


def _failure_lines(failure: dict[str, Any] | None) -> list[str]:
    if failure is None:
        return []
    known = failure["host"] or "a rank that nobody knows"
    who = known if failure["rank"] is None else f"rank {failure['rank']} on {known}"
    lines = cause.wrapped("first failure: ", f"{who}, attempt {failure['attempt']}: {failure['how']}")
    lines += [f"  {line}" for line in tracebacks.folded(failure["traceback"])[-TRACEBACK_LINES:] if line]
    if failure["others"]:
        lines.append(f"  {failure['others']} other ranks failed after it, most likely because of it")
    return [*lines, f"  log: {failure['log']}", ""]


def _cause_lines(diagnosis: dict[str, Any] | None, failure: dict[str, Any] | None) -> list[str]:
    """Return the cause and what to do. If it is not known, return the last lines of the failing rank's log.

    These are left out where an error is shown above.
    """
    if diagnosis is not None:
        return [*cause.lines(diagnosis), ""]
    if failure is None or failure["traceback"]:
        return []
    return [*cause.unknown_lines(failure["log"], cause.last_lines_of(Path(failure["log"]))), ""]


_HEAD = ("ATTEMPT", "JOB", "NODES", "RANKS", "STEPS", "CAUSE", "DECISION")


def _attempt_rows(attempts: Sequence[AttemptRecord]) -> list[tuple[str, ...]]:
    """Return the rows of the table, with the copy of the sources where there were several."""
    rows = [_HEAD, *(_attempt_cells(attempt) for attempt in attempts)]
    if all(attempt.code == 1 for attempt in attempts):
        return rows
    codes = ["CODE", *(str(attempt.code) for attempt in attempts)]
    return [(*row, code) for row, code in zip(rows, codes, strict=True)]


def _attempt_cells(attempt: AttemptRecord) -> tuple[str, ...]:
    steps = "" if attempt.step_end is None else f"{attempt.step_start or 0} to {attempt.step_end}"
    counts = (str(len(attempt.nodes)), str(attempt.world_size))
    return (str(attempt.attempt), attempt.job_id or "local", *counts, steps, attempt.cause, attempt.decision)
