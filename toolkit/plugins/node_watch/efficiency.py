"""What a run has used of its allocation, in a table, and the next request.

The rule for the next request: nodes and tasks stay, because the batches depend on them. Every other size is what the
run needed at most on any node, with a margin, and never more than was asked, except memory:

* CPUs of a task: the busiest seconds of a node, and a tenth more, shared out to its tasks.
* memory of a node: the most that was held, and a quarter more.
* time: the longest job, and a quarter and two minutes more, if the run has completed; none if a job was too short for
  the run.
* GPUs of a node: those that were ever busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from toolkit.base.durations import in_units
from toolkit.base.fsio import size_text
from toolkit.files.run_files import AttemptRecord, Efficiency, JobUsage, RunProgress, RunUsage

#: Margins of the next request.
CPU_MARGIN, MEMORY_MARGIN, TIME_MARGIN, TIME_MORE_S = 1.1, 1.25, 1.25, 120.0
#: Sizes are rounded up to a multiple of these: memory below and above 4 GiB, and time.
SMALL_STEP_BYTES, STEP_BYTES, TIME_STEP_MIN = 256 << 20, 1 << 30, 5
#: What was measured for a shorter time says too little.
LEAST_MEASURED_S = 10.0

Row: TypeAlias = tuple[str, str, str, str]
_SUMS = (
    *("wall_s", "cpu_s", "cpu_held_s", "gpu_s", "gpu_held_s", "energy_j"),
    *("read_bytes", "written_bytes", "received_bytes", "sent_bytes"),
)
_MAXIMA = ("most_cpus", "most_gpus", "most_gpu_bytes")


def of_run(
    run: RunUsage, attempts: Sequence[AttemptRecord], has_completed: bool, at: RunProgress | None = None
) -> Efficiency | None:
    """Return the efficiency of a run; None where nothing was measured. ``at``: how far its attempt is, if one runs."""
    if not run.jobs:
        return None
    total = together(run.jobs)
    longest_s = max(job.wall_s for job in run.jobs) if has_completed else None
    if any(line.cause == "timeout" for line in attempts):
        longest_s = math.inf
    is_training = at is not None and (at.step or 0) > (at.step_start or 0)
    # What was used says too little without a step, and where the last attempt ran out of memory.
    has_trained = any((line.step_end or 0) > (line.step_start or 0) for line in attempts)
    has_trained = has_trained and attempts[-1].cause != "out_of_memory"
    sbatch = None
    if (has_completed or is_training or has_trained) and total.cpu_held_s / max(1, total.cpus) >= LEAST_MEASURED_S:
        sbatch = sbatch_line(total, longest_s)
    price = run.price
    if price is None or not (price.cpu_hour or price.gpu_hour):
        return Efficiency(len(run.jobs), total, sbatch)
    cost = (total.cpu_held_s * price.cpu_hour + total.gpu_held_s * price.gpu_hour) / 3600
    used = (total.cpu_s * price.cpu_hour + total.gpu_s * price.gpu_hour) / 3600
    return Efficiency(len(run.jobs), total, sbatch, round(cost, 4), round(max(0.0, cost - used), 4), price.currency)


def together(jobs: Sequence[JobUsage]) -> JobUsage:
    """Return the use of all jobs of a run. The sizes asked for are those of the last job."""
    last = jobs[-1]
    biggest = max(jobs, key=lambda job: job.most_bytes)
    sums = {name: round(sum(getattr(job, name) for job in jobs), 2) for name in _SUMS}
    maxima = {name: max(getattr(job, name) for job in jobs) for name in _MAXIMA}
    memory = {"most_bytes": biggest.most_bytes, "most_bytes_host": biggest.most_bytes_host}
    return last.replace(**sums, **maxima, **memory)


def sbatch_line(used: JobUsage, longest_s: float | None) -> str:
    """Return how to ask for as much as was used. ``longest_s``: the longest job; inf where one was too short."""
    tasks = max(1, used.tasks_per_node)
    cpus = min(used.cpus_per_task, max(1, math.ceil(round(CPU_MARGIN * used.most_cpus / tasks, 2))))
    options = {"nodes": str(used.nodes), "ntasks-per-node": str(tasks), "cpus-per-task": str(cpus)}
    if used.most_gpus:
        options["gpus-per-node"] = str(min(used.most_gpus, used.gpus_per_node or used.most_gpus))
    step = STEP_BYTES if used.most_bytes * MEMORY_MARGIN > 4 * STEP_BYTES else SMALL_STEP_BYTES
    memory_bytes = max(1, math.ceil(used.most_bytes * MEMORY_MARGIN / step)) * step
    options["mem"] = f"{memory_bytes >> 30}G" if memory_bytes % STEP_BYTES == 0 else f"{memory_bytes >> 20}M"
    asked_min = None if used.time_limit_s is None else round(used.time_limit_s / 60)
    if longest_s == math.inf:
        asked_min = None
    elif longest_s is not None:
        steps = math.ceil((longest_s * TIME_MARGIN + TIME_MORE_S) / 60 / TIME_STEP_MIN)
        asked_min = min(steps * TIME_STEP_MIN, asked_min or 1 << 30)
    if asked_min is not None:
        options["time"] = str(asked_min)
    return "sbatch " + " ".join(f"--{name}={value}" for name, value in options.items())


def lines(efficiency: Efficiency | None) -> list[str]:
    """Return the table (asked, used, held idle), the cost and the next request, as lines."""
    if efficiency is None:
        return []
    used = efficiency.usage
    cells = [("", "ASKED", "USED", "HELD IDLE"), *rows(used)]
    widths = [max(len(row[place]) for row in cells) for place in range(4)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    table += [f"{gpu} was allocated, and no rank used it" for gpu in used.unused_gpus]
    traffic = (
        f"disk: read {size_text(used.read_bytes)}, wrote {size_text(used.written_bytes)}; network of the nodes: "
        f"in {size_text(used.received_bytes)}, out {size_text(used.sent_bytes)}"
    )
    bill = []
    if used.energy_j:
        bill.append(f"energy of the GPUs: {used.energy_j / 3.6e6:.3g} kWh")
    if efficiency.cost is not None and efficiency.idle_cost is not None:
        money = f"{efficiency.cost:.2f} {efficiency.currency or ''}".rstrip()
        bill.append(f"cost: {money}, {_share(efficiency.idle_cost, efficiency.cost)} of it for what was idle")
    advice = [] if efficiency.sbatch is None else ["enough would have been:", f"    {efficiency.sbatch}"]
    return [*table, traffic, *(["; ".join(bill)] if bill else []), *advice]


def rows(used: JobUsage) -> list[Row]:
    """Return the table's rows: what, how much was asked, used, and held idle."""
    held_s = used.cpu_held_s / max(1, used.cpus)
    average = used.cpu_s / held_s if held_s else 0.0
    # The measured peak leaves out start-up, most of a short run: a node's average, which has it, may be higher.
    peak = max(used.most_cpus, average / max(1, used.nodes))
    idle_h = max(0.0, used.cpu_held_s - used.cpu_s) / 3600
    nodes = f"on {used.nodes} node{'s' * (used.nodes > 1)}"
    idle = f"{_share(used.cpu_held_s - used.cpu_s, used.cpu_held_s)} ({idle_h:.1f} CPU h)"
    found: list[Row] = [
        ("CPUs", f"{used.cpus} {nodes}", f"{average:.1f} on average, {peak:.1f} at a node's peak", idle)
    ]
    most, asked = f"{size_text(used.most_bytes)} at most, on {used.most_bytes_host}", used.memory_bytes
    if asked is None:
        found.append(("memory", "no limit", most, ""))
    else:
        spare = max(0, asked - used.most_bytes)
        found.append(("memory", f"{size_text(asked)} a node", most, f"{_share(spare, asked)} ({size_text(spare)})"))
    if used.gpu_held_s:
        idle_h = max(0.0, used.gpu_held_s - used.gpu_s) / 3600
        busy = f"{_share(used.gpu_s, used.gpu_held_s)} busy, {size_text(used.most_gpu_bytes)} at most"
        idle = f"{_share(used.gpu_held_s - used.gpu_s, used.gpu_held_s)} ({idle_h:.1f} GPU h)"
        found.append(("GPUs", f"{used.gpus_per_node * used.nodes} {nodes}", busy, idle))
    limit = "no limit" if used.time_limit_s is None else in_units(used.time_limit_s)
    found.append(("time", limit, in_units(used.wall_s), ""))
    return found


def usage_scalars(usage: JobUsage | None) -> dict[str, float]:
    """Return what the job uses now for TensorBoard; empty where nothing is known."""
    if usage is None:
        return {}
    values = {
        "usage/cpus": usage.busy_cpus,
        "usage/memory_gib": usage.used_bytes / (1 << 30),
        "usage/shared_memory_gib": usage.shared_bytes / (1 << 30),
        "usage/disk_read_gib": usage.read_bytes / (1 << 30),
        "usage/disk_written_gib": usage.written_bytes / (1 << 30),
        "usage/network_received_gib": usage.received_bytes / (1 << 30),
        "usage/network_sent_gib": usage.sent_bytes / (1 << 30),
    }
    if usage.gpu_held_s:
        values |= {
            "usage/gpus_busy": usage.busy_gpus,
            "usage/gpu_memory_gib": usage.most_gpu_bytes / (1 << 30),
            "usage/gpu_power_w": usage.power_w,
            "usage/gpu_energy_kwh": usage.energy_j / 3.6e6,
        }
    return values


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, part) / whole:.0%}".replace("%", " %") if whole else "0 %"
