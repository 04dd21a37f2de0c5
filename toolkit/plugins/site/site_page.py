"""What `toolkit doctor` prints of a site profile."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.base.durations import in_units
from toolkit.plugins.site.site_profile import PartitionRecord, SiteProfile

#: Proofs, as they are marked in front of their lines.
_MARKS = {True: "proven", False: "FAILED", None: "not tried"}


def partition_rows(profile: SiteProfile) -> list[tuple[str, ...]]:
    """Return a table of the partitions: a head, and a row for each. The default one has a star."""
    rows: list[tuple[str, ...]] = [("PARTITION", "NODES", "CPUS", "GPUS", "MEMORY", "TIME LIMIT", "PREEMPTION")]
    for part in profile.partitions:
        name = f"{part.name}*" if part.is_default else part.name  # as sinfo marks it
        memory = f"{part.memory_mb / 1024:.0f} GiB" if part.memory_mb else "-"
        nodes = str(part.nodes) if part.is_up else f"{part.nodes} (down)"
        limit = time_text(part.time_limit_s)
        rows.append((name, nodes, str(part.cpus or "-"), gpu_text(part), memory, limit, preemption_text(profile, part)))
    return rows


def lines(profile: SiteProfile) -> Iterator[str]:
    """Yield the settings in words."""
    restarts = "at once, with --requeue=expedite" if profile.expedites else f"after {profile.requeue_delay_s:.0f} s"
    requeue = f"allowed; a requeued job may start again {restarts}"
    if not profile.can_requeue:
        requeue = "forbidden by default (JobRequeue=0); follow-up jobs continue a run"
    yield f"requeue: {requeue}"
    yield f"preemption: {profile.preempt_type.removeprefix('preempt/')}; {profile.kill_wait_s:.0f} s from TERM to KILL"
    arrays = f"indices below {profile.max_array_size}" if profile.max_array_size else "switched off"
    yield f"arrays: {arrays}; {profile.max_jobs} jobs of all users at once"
    # Without the limits enforced, a wrong request waits for ever.
    refusal = "refused" if profile.enforces_limits else "held in the queue for ever"
    yield f"a job over its partition's limits is {refusal}"
    cgroup = f"; {profile.cgroup}" if profile.cgroup else ""
    yield f"processes: {profile.proctrack}, {profile.task_plugins}{cgroup}"
    yield f"srun --mpi: {', '.join(profile.mpi_plugins) or 'no plugins'}; default {profile.mpi_default}"
    yield f"accounting: {profile.accounting}"
    for account in profile.associations:
        limits: dict[str, str | int | float | None] = {
            "on partition": account.partition,
            "qos": ", ".join(account.qos),
            "default qos": account.default_qos,
            "jobs at once": account.max_jobs,
            "jobs in the queue": account.max_submit,
            "time": account.time_limit_s and in_units(account.time_limit_s),
        }
        yield f"account {account.account}: {_listed(limits)}"
    for qos in profile.qos:
        limits = {
            "time": qos.time_limit_s and in_units(qos.time_limit_s),
            "preemption": qos.preempt_mode,
            "a user's resources": qos.max_resources,
            "a user's jobs": qos.max_submit,
        }
        yield f"qos {qos.name}: {_listed(limits)}"
    yield from (f"note: {note}" for note in profile.notes)


def proof_lines(profile: SiteProfile) -> Iterator[str]:
    """Yield a line for each proof."""
    width = max((len(proof.name) for proof in profile.proofs), default=0)
    for proof in profile.proofs:
        yield f"{_MARKS[proof.is_proven]:<9}  {proof.name:<{width}}  {proof.text}".rstrip()


def time_text(seconds: float | None) -> str:
    return "none" if seconds is None else in_units(seconds)


def gpu_text(part: PartitionRecord) -> str:
    """Return the GPUs of a node: ``4 a100``."""
    return f"{part.gpus} {part.gpu_type or ''}".strip() if part.gpus else "-"


def preemption_text(profile: SiteProfile, part: PartitionRecord) -> str:
    """Return what a preemption does to a job of this partition."""
    if profile.preempt_type == "preempt/qos":
        return "by qos"
    mode = profile.preemption(part)
    if mode is None:
        return "none"
    grace = f", {part.grace_s:.0f} s grace" if part.grace_s else ", no grace"
    return f"{mode.lower()}{grace}"


def _listed(limits: dict[str, str | int | float | None]) -> str:
    return "; ".join(f"{name} {value}" for name, value in limits.items() if value) or "no limits"
