"""Jobs and nodes as Slurm's programs print them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from toolkit.base import hostlist
from toolkit.base.durations import parse_slurms
from toolkit.base.errors import SlurmError
from toolkit.slurm import states

#: Components that are started together have start times that differ by less.
TOGETHER_S = 2.0


@dataclass(frozen=True)
class JobRow:
    """One job as ``scontrol show job`` prints it. Times are seconds since the epoch, ``None`` where Slurm has none."""

    job_id: str
    state: str  #: long form, see `toolkit.slurm.states`
    reason: str | None = None
    name: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    restarts: int = 0
    can_requeue: bool = True
    is_expedited: bool = False  #: see `SlurmCommands.forbid_requeue`
    submit_time: float | None = None
    start_time: float | None = None  #: while pending: Slurm's estimate
    end_time: float | None = None  #: while running: when the time limit or the grace time of a preemption ends it
    preempt_time: float | None = None
    time_limit_s: float | None = None  #: None: unlimited, or the partition's limit
    partition: str | None = None
    qos: str | None = None
    node_list: str = ""
    excluded: str = ""  #: node list, as asked for
    memory_bytes: int | None = None  #: of a node; None where Slurm sets no limit
    options: tuple[str, ...] = ()  #: sbatch options asked for, except sizes, which the job's environment holds
    batch_host: str | None = None
    exit_code: int | None = None  #: 0 until the job ends
    command: str | None = None
    stdout_path: str | None = None
    het_job_id: str | None = None  #: the id of the first component, for every component of a heterogeneous job
    others: tuple[JobRow, ...] = ()  #: of a first component: the other components

    @property
    def is_over(self) -> bool:
        return states.is_over(self.state)

    @property
    def is_half_started(self) -> bool:
        """True if the first component was started again, and others still are as they were started before.

        Slurm (22.05 and 24.11) does so when the first component loses its only node.
        """
        start = self.start_time
        return start is not None and any(
            other.restarts < self.restarts and other.start_time is not None and other.start_time < start - TOGETHER_S
            for other in self.others
        )

    @property
    def is_half_requeued(self) -> bool:
        """True if the first component is in the queue again, and others run: Slurm will never start it.

        Slurm (22.05) requeues it alone when it takes its only node for lost.
        """
        return self.state != "RUNNING" and any(other.state == "RUNNING" for other in self.others)

    @property
    def requeue_id(self) -> str:
        """Return the id to requeue: ``ARRAY_TASK`` for an array element. The bare id would requeue the whole array."""
        is_element = self.array_job_id is not None and (self.array_task_id or "").isdigit()
        return f"{self.array_job_id}_{self.array_task_id}" if is_element else self.job_id


@dataclass(frozen=True)
class JobStatus:
    """The fields of a job that squeue reports. sacct reports no reason and start, but the exit code."""

    job_id: str
    state: str
    reason: str | None = None
    node_list: str = ""
    start_time: float | None = None  #: in seconds since the epoch; while pending: Slurm's estimate
    command: str | None = None  #: the batch script, with its arguments; empty without one, None where it is unknown
    exit_code: int | None = None  #: from accounting alone, 0 after a signal

    @property
    def is_over(self) -> bool:
        # A job that another cluster has started is known here to the controller until it has ended there.
        return states.is_over(self.state) or (self.state == "REVOKED" and self.exit_code is not None)

    @property
    def is_paused(self) -> bool:
        """True while Slurm has stopped the job's processes. It sends them no signal then, and scancel would wait."""
        return self.state in states.PAUSED


#: Fields that take the rest of their line: users write spaces and ``=`` into them.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
)
_NOTHING = frozenset({"", "(null)", "None", "None assigned", "N/A", "Unknown"})


def parse_jobs(text: str) -> list[JobRow]:
    """Return the jobs in the output of ``scontrol show job``, without ``--oneliner``.

    With it a comment such as ``x JobState=FAILED`` would read as a field. Here a free text ends where its line ends. If
    a field appears twice, the first counts: it is Slurm's own.
    """
    return [_row(_fields(record)) for record in re.split(r"\n(?=JobId=)", text) if record.startswith("JobId=")]


def parse_drained(text: str) -> dict[str, str]:
    """Return the nodes that Slurm gives no new job, in ``scontrol show node``'s output, each with the reason.

    They are drained, draining, failed or failing. A state is ``MIXED+DRAIN``, with ``*`` behind a part if the node does
    not answer. The reason ends with who gave it and when: ``new fan [root@1795417311]``.
    """
    found = {}
    for record in re.split(r"\n(?=NodeName=)", text):
        name = re.match(r"NodeName=(\S+)", record)
        state = re.search(r"^ +State=(\S+)", record, re.MULTILINE)
        reason = re.search(r"^ +Reason=(.*?)(?: \[([^\s@]+)@\S+\])?$", record, re.MULTILINE)
        if name and state and not {"DRAIN", "FAIL", "FAILING"}.isdisjoint(re.split(r"\W", state[1])):
            found[name[1]] = "no reason given" if reason is None else " by ".join(filter(None, reason.groups()))
    return found


def _fields(record: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in record.splitlines():
        rest = line.strip()
        while rest:
            name, _, rest = rest.partition("=")
            if name in _FREE_TEXT:  # it may contain spaces and takes the rest of the line
                fields.setdefault(name, rest)
                break
            value, _, rest = rest.partition(" ")
            fields.setdefault(name, value)
            rest = rest.strip()
    return {name: value for name, value in fields.items() if value not in _NOTHING}


def _row(fields: Mapping[str, str]) -> JobRow:
    return JobRow(
        job_id=fields["JobId"],
        state=states.canonical(fields.get("JobState", "")),
        reason=fields.get("Reason"),
        name=fields.get("JobName"),
        array_job_id=fields.get("ArrayJobId"),
        array_task_id=fields.get("ArrayTaskId"),
        restarts=int(fields.get("Restarts", "0")),
        can_requeue=fields.get("Requeue", "1") != "0",
        is_expedited=fields.get("ExpeditedRequeue") == "Yes",
        submit_time=parse_time(fields.get("SubmitTime")),
        start_time=parse_time(fields.get("StartTime")),
        end_time=parse_time(fields.get("EndTime")),
        preempt_time=parse_time(fields.get("PreemptTime")),
        time_limit_s=parse_slurms(fields.get("TimeLimit")),
        partition=fields.get("Partition"),
        qos=fields.get("QOS"),
        node_list=fields.get("NodeList", ""),
        excluded=fields.get("ExcNodeList", ""),
        memory_bytes=_memory_of_node(fields),
        options=tuple(_options(fields)),
        batch_host=fields.get("BatchHost"),
        exit_code=_exit_code(fields.get("ExitCode")),
        command=fields.get("Command"),
        stdout_path=fields.get("StdOut"),
        het_job_id=fields.get("HetJobId"),
    )


def row_of(rows: Sequence[JobRow], job_id: str) -> JobRow | None:
    """Return the row of this job: of an array the first, of a heterogeneous job one that stands for all components."""
    row = next((row for row in rows if job_id in (row.job_id, row.requeue_id)), rows[0] if rows else None)
    others = tuple(each for each in rows if row is not None and each is not row and each.het_job_id == row.job_id)
    if row is None or not others:
        return row
    whole = (row, *others)
    return replace(
        row,
        others=others,
        # It ends with the component that ends first.
        end_time=min((each.end_time for each in whole if each.end_time is not None), default=None),
        preempt_time=next((each.preempt_time for each in whole if each.preempt_time is not None), None),
        can_requeue=all(each.can_requeue for each in whole),
        node_list=",".join(each.node_list for each in whole if each.node_list),
    )


def _memory_of_node(fields: Mapping[str, str]) -> int | None:
    """Return the memory that the job has on a node, or asks for. Its TRES counts that of all nodes together."""
    tres = fields.get("AllocTRES") or fields.get("TRES") or fields.get("ReqTRES") or ""
    total = re.search(r"(?:^|,)mem=([0-9.]+[KMGTP]?)", tres)
    nodes = re.match(r"[1-9][0-9]*", fields.get("NumNodes", ""))
    if total and nodes:
        return _bytes(total[1]) // int(nodes[0]) or None
    return _bytes(fields.get("MinMemoryNode", "0")) or None


def _bytes(text: str) -> int:
    """Return the bytes of ``500M`` or ``1.50G``; a bare number is in MiB. Return 0 for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGTP]?)", text)
    return round(float(match[1]) * 1024 ** ("KMGTP".index(match[2] or "M") + 1)) if match else 0


@dataclass(frozen=True)
class JobGpus:
    """The GPUs that a job has, by node, and what else it asked for by node in ``--gres``."""

    of_host: Mapping[str, int]
    other_gres: tuple[str, ...] = ()  #: of each component, such as ``scratch:10,nic:1``, or ``shard:2``, parts of a GPU
    are_asked: bool = True  #: False: they are there because the job has its nodes to itself
    #: ``gpu:a:2,gpu:b:2``, by node, where it was given several types
    types_of_host: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parse_gpus(text: str) -> JobGpus:
    """Return the GPUs in the output of ``scontrol --details show job``, of all types together.

    A line of it is ``Nodes=node[1-2] CPU_IDs=4-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)``.
    """
    of_host, types_of_host = dict[str, int](), dict[str, str]()
    others, are_asked = list[str](), False
    for record in re.split(r"\n(?=JobId=)", text):
        asked = re.search(r"^ +TresPerNode=(\S+)", record, re.MULTILINE)
        items = [item.replace("=", ":") for item in _GRES.findall(asked[1])] if asked else []
        # A job that asks for a type of shards is refused a step with that type.
        items = [re.sub(r"^(shard|mps):[^:]+:", r"\1:", item) for item in items]
        others.append(",".join(item for item in items if item.partition(":")[0] != "gpu"))
        requests = re.findall(r"^ +TresPer\w+=(\S*gres[:/]gpu\b\S*)", record, re.MULTILINE)
        are_asked |= bool(requests)
        types = re.findall(r"gres[:/]gpu:([^:=,]*[^:=,\d][^:=,]*)", ",".join(requests))
        is_whole = re.search(r"\bOverSubscribe=NO\b", record) is not None
        for nodes, gres in re.findall(r"^ +Nodes=(\S+) .*\bGRES=(\S*)", record, re.MULTILINE):
            by_type = re.findall(r"(?:^|,)gpu((?::[^:(),]+)?):(\d+)", gres)
            hosts = hostlist.expand(nodes)
            of_host |= dict.fromkeys(hosts, sum(int(count) for _, count in by_type))
            # Slurm 22.05 refuses a step a number without types where the job was given several: by its request, or
            # with whole nodes. It refuses a step a type where the job was given a number.
            parts = [f"gpu{kind}:{count}" for kind, count in by_type if count != "0"]
            if len(types) > 1 or (is_whole and len(parts) > 1):
                types_of_host |= dict.fromkeys(hosts, ",".join(parts))
    return JobGpus(of_host, tuple(others), are_asked, types_of_host)


#: sbatch's options, by the fields in which scontrol shows them.
_OPTION_OF = {
    "Features": "constraint",
    "ExcNodeList": "exclude",
    "ReqNodeList": "nodelist",
    "Licenses": "licenses",
    "QOS": "qos",  # before 24.05 the variable SLURM_JOB_QOS holds its description, if it has one
}
_OPTIONS_OF_GPUS = {
    "TresPerJob": "gpus",
    "TresPerSocket": "gpus-per-socket",
    "TresPerTask": "gpus-per-task",
    "CpusPerTres": "cpus-per-gpu",
    "MemPerTres": "mem-per-gpu",
}
_EXCLUSIVE = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs"}
#: ``gres:gpu:a100:4`` in Slurm 22.05, ``gres/gpu:a100:4`` since 23.02; since 24.05 with ``=`` before a task's number.
_GRES = re.compile(r"gres[:/]([^,]+)")


def _options(fields: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that the user gave sbatch, wherever he wrote them."""
    for field, option in _OPTION_OF.items():
        if field in fields:
            yield f"--{option}={fields[field]}"
    # GPUs and other generic resources stand in TRES strings: those of a node, then those of the job or a task.
    gres = [item.replace("=", ":") for item in _GRES.findall(fields.get("TresPerNode", ""))]
    if gres:
        yield f"--gres={','.join(gres)}"
    for field, option in _OPTIONS_OF_GPUS.items():
        items = [item.replace("=", ":").partition(":") for item in _GRES.findall(fields.get(field, ""))]
        if numbers := [number for name, _, number in items if name == "gpu"]:  # of a flag given twice the last counts
            yield f"--{option}={','.join(numbers)}"
    # Exclusive use is shown as a value of OverSubscribe.
    if fields.get("OverSubscribe") in _EXCLUSIVE:
        yield _EXCLUSIVE[fields["OverSubscribe"]]


def parse_time(text: str | None) -> float | None:
    """Return seconds since the epoch for ``1795190400`` or ``2026-11-20T16:00:00`` (local time), else ``None``."""
    if text is None or text in _NOTHING:
        return None
    if text.isdigit():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _exit_code(text: str | None) -> int | None:
    """Parse an exit code before a signal, as in ``1:0``."""
    match = re.fullmatch(r"([0-9]+):[0-9]+", text or "")
    return int(match[1]) if match else None


def job_lines(text: str) -> list[str]:
    """Return the rows of squeue or sacct, without what a site's wrapper prints. Raises SlurmError if that is all."""
    rows = [line for line in text.splitlines() if re.match(r"\s*[0-9]+[^|\s]*\s*\|", line)]
    if text.strip() and not rows:
        raise SlurmError(f"Slurm printed, instead of rows of jobs, {text.strip()[:200]!r}")
    return rows


def parse_statuses(rows: Iterable[str]) -> list[JobStatus]:
    return [_status(line) for line in rows if line.count("|") >= 2]


def _status(line: str) -> JobStatus:
    job_id, state, node_list, *more = line.split("|", 5)
    # squeue's last columns. The command comes last: it may have a | in it. sacct has the exit code in their place.
    start, reason = (*more[:2], "", "")[:2] if len(more) > 1 else ("", "")
    command = more[2] if len(more) > 2 else None
    return JobStatus(
        job_id.strip(),
        states.canonical(state),
        None if reason in _NOTHING else reason,
        "" if node_list in _NOTHING else node_list,
        parse_time(start),
        "" if command in _NOTHING else command,
        _exit_code(more[0]) if len(more) == 1 else None,
    )


def status_line(status: JobStatus) -> str:
    """Return the line that :func:`parse_statuses` reads back."""
    start = "" if status.start_time is None else f"{status.start_time:.0f}"
    columns = (status.job_id, status.state, status.node_list, start, status.reason or "")
    return "|".join(columns if status.command is None else (*columns, status.command))


def base_id(job_id: str) -> str:
    """Return an id that every squeue takes. It takes ``A_T`` only for array elements that it has split off."""
    return job_id.replace("+", "_").partition("_")[0]


Row = TypeVar("Row", JobRow, JobStatus)


def rows_by_id(job_ids: Iterable[str], rows: Sequence[JobStatus]) -> dict[str, JobStatus | None]:
    """Return the row of each id. A whole array or het job gets an unfinished member's row, while there is one."""
    by_id: dict[str, list[JobStatus]] = {}
    for row in rows:
        # The row of an array element or het component also stands for the whole job.
        for name in {row.job_id, base_id(row.job_id)}:
            by_id.setdefault(name, []).append(row)
    return {job_id: current_row(by_id.get(job_id, [])) for job_id in job_ids}


def current_row(rows: Sequence[Row]) -> Row | None:
    """Return the first row of a job that is not over, else the last. Return None without rows."""
    return next((row for row in rows if not row.is_over), rows[-1] if rows else None)
