"""Keeps a job's resource usage in its run: the sum of the agents' samples."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from toolkit.base import hostlist, logs
from toolkit.config.cluster import PriceConfig
from toolkit.files import records
from toolkit.files.run_files import JobUsage, PriceRecord
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.node_watch.usage import NodeUsage
from toolkit.run.attempt.attempt import Attempt
from toolkit.slurm.environment import component_environments
from toolkit.slurm.jobs import JobRow

#: A GPU that has been idle for this long, and for as long as the attempt runs, is named as unused.
UNUSED_AFTER_S = 240.0
#: The first sample after an attempt's begin comes this much later.
SAMPLE_AGE_S = 30.0
#: GPUs that have worked for this long have had their full link at some sample; of few GPUs none is the odd one.
LINK_BUSY_S, LEAST_LINKS = 300.0, 4
LOOK_EVERY_S, WRITE_EVERY_S = 5.0, 60.0

log = logs.get(__name__)

#: The newest sample of each agent, by its host and its begin.
Samples = Mapping[tuple[str, float], NodeUsage]


class JobUsageRecorder:
    """Keeps ``usage.json`` for one job."""

    def __init__(self, run: RunDir, allocation: Allocation, price: PriceConfig, environ: Mapping[str, str]) -> None:
        self._run, self._allocation = run, allocation
        self._price = PriceRecord(price.cpu_hour, price.gpu_hour, price.currency)
        # Slurm rounds up the CPUs that were asked for, and may give whole nodes.
        parts = component_environments(environ) if allocation.job_id else []
        given = [hostlist.expand_counts(part.get("SLURM_JOB_CPUS_PER_NODE", "")) for part in parts]
        self._cpus = sum(map(sum, given)) or allocation.cpus_per_task * allocation.world_size
        self._since = time.time()
        self._samples: dict[tuple[str, float], NodeUsage] = {}
        self._usage: JobUsage | None = None
        self._slow_links: Mapping[str, str] = {}
        self._look_at = self._write_at = 0.0
        self._named: set[tuple[int, str]] = set()  #: attempt and GPU

    def update(
        self,
        messages: Mapping[tuple[str, float], Mapping[str, Any]],
        attempt: Attempt,
        row: JobRow | None,
        *,
        is_last: bool = False,
    ) -> JobUsage | None:
        """Return what the job has used so far; None before the first sample. ``row`` is the job in Slurm.

        A GPU that no rank uses is logged once in each attempt. The result is computed anew every ``LOOK_EVERY_S``.
        """
        now = time.monotonic()
        if not messages or (now < self._look_at and not is_last):
            return self._usage
        self._look_at = now + LOOK_EVERY_S
        for agent, message in messages.items():  # most are known from the last look
            if (known := self._samples.get(agent)) is None or known.until != message["until"]:
                self._samples[agent] = records.decode(NodeUsage, message)
        samples = self._samples
        self._slow_links = slow_links(_newest(samples))
        unused = unused_gpus(samples, attempt)
        for gpu in unused:
            if (attempt.number, gpu) not in self._named:
                self._named.add((attempt.number, gpu))
                log.warning("%s is allocated, and no rank has used it for minutes", gpu)
        self._usage = sum_up(samples, self._asked(row)).replace(unused_gpus=tuple(unused))
        if is_last or now >= self._write_at:
            self._write_at = now + WRITE_EVERY_S
            self._write(self._usage)
        return self._usage

    def slow_links(self) -> Mapping[str, str]:
        """Return the nodes with a GPU whose PCIe link is slower than the others', with the reason."""
        return self._slow_links

    def _write(self, usage: JobUsage) -> None:
        """Put ``usage`` in the place of what was written of this job before."""
        try:
            known = self._run.usage()
            # The supervisor after a killed one has the same agents, but may not have heard of the earliest of them yet.
            # The agents of a job that was requeued begin after the last sample of its earlier start.
            job_id, since = usage.job_id, usage.since
            others = [job for job in known.jobs if job.job_id != job_id or max(job.since, job.until) < since]
            self._run.write_usage(known.replace(jobs=(*others, usage), price=self._price))
        except OSError as error:  # a full disk or a file server that is away; the next try is a minute away
            log.warning("usage.json cannot be written: %s", error)

    def _asked(self, row: JobRow | None) -> JobUsage:
        job = self._allocation
        began = self._since if row is None or row.start_time is None else min(row.start_time, self._since)
        return JobUsage(
            job_id=job.job_id,
            wall_s=round(time.time() - began, 1),
            nodes=len(job.hosts),
            tasks_per_node=max(job.tasks),
            cpus_per_task=job.cpus_per_task,
            cpus=self._cpus,
            memory_bytes=None if row is None else row.memory_bytes,
            time_limit_s=None if row is None else row.time_limit_s,
            gpus_per_node=job.gpus_per_node,
        )


def sum_up(samples: Samples, asked: JobUsage) -> JobUsage:
    """Return ``asked`` with what the nodes have used. An agent that has ended counts with its last sample."""
    # Sums are over all agents that ever ran; present values are over the last agent of each host.
    every, now = [*samples.values()], [*_newest(samples).values()]
    gpus = [gpu for usage in every for gpu in usage.gpus]
    gpus_now = [gpu for usage in now for gpu in usage.gpus]
    held_s = sum(usage.until - usage.since for usage in every)
    (host, _), biggest = max(samples.items(), key=lambda item: item[1].most_memory_bytes)
    return asked.replace(
        since=min(usage.since for usage in every),
        until=max(usage.until for usage in every),
        cpu_s=round(sum(usage.cpu_s for usage in every), 2),
        # The job's CPUs are counted as spread evenly over its nodes.
        cpu_held_s=round(held_s * asked.cpus / max(1, asked.nodes), 1),
        busy_cpus=round(sum(usage.cpus for usage in now), 2),
        most_cpus=round(max(usage.most_cpus for usage in every), 2),
        used_bytes=max(usage.memory_bytes for usage in now),
        shared_bytes=max(usage.shared_bytes for usage in now),
        most_bytes=biggest.most_memory_bytes,
        most_bytes_host=host,
        gpu_s=round(sum(gpu.busy_s for gpu in gpus), 1),
        gpu_held_s=round(sum(len(usage.gpus) * (usage.until - usage.since) for usage in every), 1),
        busy_gpus=round(sum(gpu.busy for gpu in gpus_now), 2),
        most_gpus=max(sum(gpu.busy_s > 0 for gpu in usage.gpus) for usage in every),
        most_gpu_bytes=max((gpu.most_memory_bytes for gpu in gpus), default=0),
        power_w=round(sum(gpu.power_w for gpu in gpus_now), 1),
        energy_j=round(sum(gpu.energy_j for gpu in gpus), 1),
        read_bytes=sum(usage.read_bytes for usage in every),
        written_bytes=sum(usage.written_bytes for usage in every),
        received_bytes=sum(usage.received_bytes for usage in every),
        sent_bytes=sum(usage.sent_bytes for usage in every),
    )


def unused_gpus(samples: Samples, attempt: Attempt) -> list[str]:
    """Return the GPUs that have been idle since the attempt began, ``UNUSED_AFTER_S`` or longer.

    Durations are compared, so the clocks of the nodes need not agree.
    """
    age_s = time.time() - attempt.started
    return [
        f"GPU {gpu.index} of {host}"
        for host, usage in sorted(_newest(samples).items())
        if host in attempt.plan.hosts
        for gpu in usage.gpus
        if gpu.idle_s >= UNUSED_AFTER_S and gpu.idle_s >= age_s - SAMPLE_AGE_S
    ]


def slow_links(newest: Mapping[str, NodeUsage]) -> dict[str, str]:
    """Return the reason by node whose GPU has a slow PCIe link for its model. Idle ones may lower it."""
    by_model = defaultdict[str, dict[tuple[str, int], tuple[int, int]]](dict)
    for host, usage in newest.items():
        for gpu in usage.gpus:
            if gpu.busy_s >= LINK_BUSY_S and all(gpu.link):
                by_model[gpu.model][host, gpu.index] = gpu.link
    slow = dict[str, str]()
    for links in by_model.values():
        if len(links) < LEAST_LINKS:
            continue
        usual = statistics.mode(links.values())
        others = f"most GPUs of the job by {usual[0]} x{usual[1]}"
        for (host, index), link in links.items():
            if link[0] * link[1] < usual[0] * usual[1]:
                slow[host] = f"GPU {index} is linked by PCIe {link[0]} x{link[1]}, and {others}"
    return slow


def _newest(samples: Samples) -> dict[str, NodeUsage]:
    """Return the sample of each host's last agent."""
    return {host: usage for (host, _), usage in sorted(samples.items(), key=lambda item: item[0][1])}
