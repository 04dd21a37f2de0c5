"""Where the start of an attempt went: seconds by part.

The start is the time from the submission to the end of the first step. The batch host's clock tells when the
supervisor, the agents and their imports were ready. Rank 0 tells how long each of its own parts took. The two clocks
are never compared. What is between them, the start of the ranks' processes, is ``ranks``. So the parts always sum to
the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.files.run_files import AttemptStart, RunProgress

#: What rank 0 measures before its first step, see `toolkit.ranks.session`.
IN_RANK = ("program", "group", "data", "resume")
PARTS = ("submit", "queue", "supervisor", "agents", "checks", "imports", "ranks", *IN_RANK, "first_step")
WORDS = {
    "submit": "submission",
    "queue": "in the queue",
    "supervisor": "start of the job and its supervisor",
    "agents": "agent of its node",
    "checks": "checks and copies",
    "imports": "imports before ranks are forked",
    "ranks": "store and ranks' processes",
    "program": "the job's own imports",
    "group": "process group of all ranks",
    "data": "data and model",
    "resume": "reading the checkpoint",
    "first_step": "first step",
}


def of_attempt(
    start: AttemptStart, began: float, first_step: float | None, progress: RunProgress, submit_s: float = 0.0
) -> dict[str, float]:
    """Return the seconds of each of PARTS; empty before the first step.

    ``began`` is when the supervisor began the attempt, after the checks of the nodes. ``first_step`` is when the first
    step began. Both are seconds since the epoch, on the clock of the times in ``start``. Its ``marks`` say when the
    agents were ordered (``prepared``), and when that of rank 0 was ``connected`` and had ``imported``: rank 0 waits for
    slower nodes in its process group. A part counts from the moment when all parts before it had ended, so a part that
    ran beside a slower one takes no time of its own.
    """
    if first_step is None:
        return {}
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"submit": submit_s, "queue": start.queue_s}
    since = start.ready
    for name, moment in (
        ("supervisor", start.marks.get("prepared")),
        ("agents", start.marks.get("connected")),
        ("checks", began),
        ("imports", start.marks.get("imported")),
    ):
        if moment is not None and moment > since:
            until = max(since, min(moment, first_step))
            parts[name], since = until - since, until
    # Shrink what rank 0 has measured if clocks were set, and it took longer than there was time.
    left_s = max(0.0, first_step - since)
    in_rank = {name: progress.start_up.get(name, 0.0) for name in IN_RANK}
    total_s = sum(in_rank.values())
    scale = left_s / total_s if total_s > left_s else 1.0
    parts |= {name: scale * seconds for name, seconds in in_rank.items()}
    parts["ranks"] = max(0.0, left_s - total_s)
    parts["first_step"] = progress.start_up.get("first_step", 0.0)
    return parts


def as_json(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts for a file, rounded."""
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def sentence(parts: Mapping[str, float]) -> str:
    """Return the parts of 50 ms and more as a text, in their order.

    Such as ``4.6 s to the end of the first step: 1.2 s ...``.
    """
    whole_s = sum(parts.get(part, 0.0) for part in PARTS)
    if not whole_s:
        return ""
    told = [f"{parts[part]:.1f} s {WORDS[part]}" for part in PARTS if parts.get(part, 0.0) >= 0.05]
    return f"{whole_s:.1f} s to the end of the first step: {', '.join(told)}".removesuffix(": ")
