"""The real `Slurm` with stubs on its PATH: its calls, and how it reads answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base.durations import as_clock, in_one_unit, in_units, parse_slurms
from toolkit.base.errors import SlurmError, SlurmRefusedError
from toolkit.slurm import states
from toolkit.slurm.commands import Slurm
from toolkit.slurm.environment import step_environment, submit_environment
from toolkit.slurm.jobs import JobGpus, JobStatus, parse_drained, parse_gpus, parse_jobs, parse_time, row_of
from toolkit.slurm.srun_commands import SrunStep, limit_options, srun_argv
from toolkit.slurm.states import Phase, canonical, is_over, phase

# `scontrol show job` of Slurm 22.05.8, with a comment that looks like fields.
RUNNING = """JobId=1 JobName=my job
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=root QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:05 TimeLimit=00:10:00 TimeMin=N/A
   SubmitTime=1795188628 EligibleTime=1795188628
   StartTime=1795188629 EndTime=1795189229 Deadline=N/A
   PreemptEligibleTime=1795188629 PreemptTime=None
   Partition=main AllocNode:Sid=login:125
   ReqNodeList=node[1-3] ExcNodeList=(null)
   NodeList=node[1-3]
   BatchHost=node1
   NumNodes=3 NumCPUs=5 NumTasks=5 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=/shared/my job.sh a=b
   WorkDir=/work
   Comment=x JobState=FAILED a=b
   StdErr=/dev/null
   StdIn=/dev/null
   StdOut=/logs/a b.out
   Power=
"""
#: The line that tells what was asked for, and sbatch's options for it.
ASKED = {
    "Features=(null) OverSubscribe=OK Licenses=(null)": (),
    "Features=a100&ib DelayBoot=00:00:00": ("--constraint=a100&ib",),
    "ReqNodeList=node[2-3] ExcNodeList=node7": ("--exclude=node7", "--nodelist=node[2-3]"),
    "OverSubscribe=NO Contiguous=0 Licenses=matlab:1 Network=(null)": ("--licenses=matlab:1", "--exclusive"),
    "OverSubscribe=USER": ("--exclusive=user",),
    "TresPerNode=gres:gpu:a100:4,gres:shard:2": ("--gres=gpu:a100:4,shard:2",),  # 22.05
    "TresPerNode=gres/gpu:1": ("--gres=gpu:1",),  # 24.11
    "TresPerTask=gres:gpu:1": ("--gpus-per-task=1",),
    "TresPerTask=cpu=2,gres/gpu=1": ("--gpus-per-task=1",),
    "TresPerJob=gres:gpu:fake:4,gres:gpu:other:2": ("--gpus=fake:4,other:2",),
    "TresPerSocket=gres/gpu:2 CpusPerTres=gres/gpu:8": ("--gpus-per-socket=2", "--cpus-per-gpu=8"),
    "MemPerTres=gres/gpu:100 TresPerJob=gres/gpu:a100:2": ("--gpus=a100:2", "--mem-per-gpu=100"),
}
ELEMENT = """JobId=4 ArrayJobId=2 ArrayTaskId=1 JobName=wrap
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
"""
REST = """JobId=2 ArrayJobId=2 ArrayTaskId=2-3%2 JobName=wrap
   JobState=PENDING Reason=JobArrayTaskLimit Dependency=(null)
"""


#: `scontrol show node` of Slurm 22.05.8, shortened; the states are of 22.05 to 24.11.
NODES = """NodeName=node1 Arch=x86_64 CoresPerSocket=1
   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0
   State=ALLOCATED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

NodeName=node2 Arch=x86_64 CoresPerSocket=1
   State=ALLOCATED+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
   Reason=new fan, please [root@1795417311]

NodeName=node3 Arch=x86_64 CoresPerSocket=1
   State=MIXED*+DRAIN+REBOOT_REQUESTED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

NodeName=node4 Arch=x86_64 CoresPerSocket=1
   State=DOWN* ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=State=IDLE+DRAIN [slurm@1795417311]

NodeName=node5 Arch=x86_64 CoresPerSocket=1
   State=DRAIN* ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=State=IDLE [or so [alice@1795417311]
"""


class Stubs:
    """Programs that record how they were called, and give the test's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def slurm(self, timeout_s: float = 10.0, **environ: str) -> Slurm:
        return Slurm({"PATH": f"{self.folder}:/bin:/usr/bin", **environ}, timeout_s=timeout_s)

    def add(self, program: str, stdout: str = "", stderr: str = "", code: int = 0, before: str = "") -> None:
        answers = {"out": stdout, "err": stderr}
        for name, text in answers.items():
            (self.folder / f"{program}.{name}").write_text(text)
        path = self.folder / program
        path.write_text(
            f'#!/bin/sh\n{before}\necho "$*" >> {self.folder}/{program}.calls\nenv > {self.folder}/{program}.env\n'
            f"cat {self.folder}/{program}.out\ncat {self.folder}/{program}.err >&2\nexit {code}\n"
        )
        path.chmod(0o755)

    def calls(self, program: str) -> list[str]:
        path = self.folder / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def environ(self, program: str) -> dict[str, str]:
        lines = (self.folder / f"{program}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path)


def test_a_job_is_read_with_its_times_and_free_texts() -> None:
    (row,) = parse_jobs(RUNNING)
    assert (row.job_id, row.state, row.name, row.restarts) == ("1", "RUNNING", "my job", 2)
    assert (row.start_time, row.end_time, row.preempt_time) == (1795188629.0, 1795189229.0, None)
    assert (row.time_limit_s, row.node_list, row.batch_host) == (600.0, "node[1-3]", "node1")
    assert (row.command, row.stdout_path) == ("/shared/my job.sh a=b", "/logs/a b.out")


def test_a_comment_cannot_pretend_to_be_a_state_or_name_an_array() -> None:
    (row,) = parse_jobs(RUNNING.replace("Comment=x ", "Comment=x\n   JobState=COMPLETED "))
    assert row.state == "RUNNING"
    (row,) = parse_jobs(RUNNING.replace("Comment=x ", "Comment=x ArrayJobId=5 ArrayTaskId=3 "))
    assert row.requeue_id == row.job_id


@pytest.mark.parametrize(("line", "options"), ASKED.items())
def test_what_was_asked_for_can_be_asked_for_again(line: str, options: tuple[str, ...]) -> None:
    assert parse_jobs(f"JobId=1 JobName=wrap\n   {line}\n")[0].options == options


DETAILS = """JobId=3 JobName=x
   JOB_GRES=gpu:a:6,gpu:b:4,scratch:30
     Nodes=node[1-2] CPU_IDs=0-3 Mem=0 GRES=scratch(CNT:10),gpu:a:2(IDX:0-1),gpu:b:2(IDX:2-3)
     Nodes=node3 CPU_IDs=0 Mem=0 GRES=gpu:a:2(IDX:0,3)
     Nodes=node4 CPU_IDs=0 Mem=0 GRES=
   TresPerJob=gres:gpu:10
   TresPerNode={asked}
"""


@pytest.mark.parametrize("asked", ["gres:scratch:10,gres:gpu:a:2", "gres/scratch:10,gres/gpu:2"])
def test_each_node_has_its_own_number_of_gpus_of_all_types(asked: str) -> None:
    found = parse_gpus(DETAILS.format(asked=asked))
    assert found == JobGpus({"node1": 4, "node2": 4, "node3": 2, "node4": 0}, ("scratch:10",))


@pytest.mark.parametrize(
    ("asked", "types"),
    [
        ("TresPerNode=gres:gpu:a:2,gres:gpu:b:2", "gpu:a:2,gpu:b:2"),  # 22.05
        ("TresPerJob=gres/gpu:a:4,gres/gpu:b:4", "gpu:a:2,gpu:b:2"),  # 24.11
        ("OverSubscribe=NO", "gpu:a:2,gpu:b:2"),  # --exclusive
        ("OverSubscribe=NO\n   TresPerNode=gres:gpu:2", "gpu:a:2,gpu:b:2"),
        ("TresPerNode=gres:gpu:4", None),  # Slurm 22.05 refuses a step a type here
        ("TresPerTask=cpu=2,gres/gpu=1", None),
        ("TresPerNode=gres/gpu:a:2", None),
    ],
)
def test_gpus_of_several_types_are_asked_for_by_type(asked: str, types: str | None) -> None:
    details = f"     Nodes=node[1-2] CPU_IDs=4-7 Mem=0 GRES=gpu:a:2(IDX:0-1),gpu:b:2(IDX:2-3),gpu:c:0(IDX:)\n   {asked}"
    found = parse_gpus(details)
    assert found.of_host == {"node1": 4, "node2": 4}
    assert found.types_of_host == ({} if types is None else {"node1": types, "node2": types})


@pytest.mark.parametrize("asked", ["gres:shard:2", "gres/shard:a:2"])
def test_parts_of_gpus_are_asked_for_without_their_type(asked: str) -> None:
    """Slurm grants a job `shard:a:2`, and refuses every step of it that says so."""
    found = parse_gpus(f"     Nodes=node1 CPU_IDs=0 Mem=0 GRES=shard:2(2/4,0/4)\n   TresPerNode={asked}")
    assert found == JobGpus({"node1": 0}, ("shard:2",), are_asked=False)


def test_drained_nodes_are_found_with_their_reasons_whatever_else_is_in_the_line() -> None:
    assert parse_drained(NODES) == {
        "node2": "new fan, please by root",
        "node3": "no reason given",
        "node5": "State=IDLE [or so by alice",
    }
    assert parse_drained("") == {}
    failing = "NodeName=node1 Arch=x86_64\n   State=MIXED+FAIL* ThreadsPerCore=1\n   Reason=new fan [root@1795417311]\n"
    assert parse_drained(failing) == {"node1": "new fan by root"}


def test_all_nodes_are_asked_for_at_once_and_given_back_at_once(stubs: Stubs) -> None:
    stubs.add("scontrol", NODES)
    slurm = stubs.slurm(SLURM_JOB_ID="7")
    assert list(slurm.drain_reasons("node[1-5]")) == ["node2", "node3", "node5"]
    slurm.release_nodes("7_1", keep="node[1,3]")
    assert stubs.calls("scontrol") == ["--all show node node[1-5]", "update JobId=7_1 NodeList=node[1,3]"]
    assert "SLURM_JOB_ID" not in stubs.environ("scontrol")  # else it leaves scripts in our working directory


def test_an_array_element_is_requeued_by_its_index_and_its_unsplit_rest_by_no_index() -> None:
    element, rest = parse_jobs(ELEMENT + "\n" + REST)
    assert element.requeue_id == "2_1"
    assert rest.requeue_id == "2"


#: Two components on Slurm 22.05, shortened. A preemption takes both, and both end with the one that ends first.
HET = """JobId=1 HetJobId=1 HetJobOffset=0 JobName=s.sh
   HetJobIdSet=1-2
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=1795188629 EndTime=1795189229 Deadline=N/A
   PreemptEligibleTime=1795188629 PreemptTime=None
   NodeList=node1
     Nodes=node1 CPU_IDs=0-3 Mem=0 GRES=gpu:a100:4(IDX:0-3)
   TresPerNode=gres:gpu:a100:4,gres:scratch:10

JobId=2 HetJobId=1 HetJobOffset=1 JobName=s.sh
   HetJobIdSet=1-2
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=1795188629 EndTime=1795188929 Deadline=N/A
   PreemptEligibleTime=1795188629 PreemptTime=1795188700
   NodeList=node[2-3]
     Nodes=node[2-3] CPU_IDs=0 Mem=0 GRES=
"""


def test_the_row_of_a_heterogeneous_job_stands_for_all_its_components() -> None:
    row = row_of(parse_jobs(HET), "1")
    assert (row.job_id, row.node_list, row.end_time) == ("1", "node1,node[2-3]", 1795188929.0)
    assert row.preempt_time == 1795188700.0
    assert [other.job_id for other in row.others] == ["2"]
    assert parse_gpus(HET) == JobGpus({"node1": 4, "node2": 0, "node3": 0}, ("scratch:10", ""))


def test_a_duration_below_0_by_clocks_that_differ_is_shown_as_none() -> None:
    assert (in_units(-5), in_units(-86_400.4), in_one_unit(-5), as_clock(-5)) == ("0 s", "0 s", "0 s", "0:00")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("1-02:03:04", 93784),
        ("10:00", 600),
        ("10", 600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        (None, None),
    ],
)
def test_durations_are_read_as_seconds(text: str | None, seconds: float | None) -> None:
    assert parse_slurms(text) == seconds


@pytest.mark.parametrize("text", [None, "Unknown", "None", "N/A", "(null)", "soon"])
def test_no_time_is_none(text: str | None) -> None:
    assert parse_time(text) is None


def test_times_are_read_as_local_time_or_as_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    assert parse_time("2026-11-20T15:30:28") == parse_time("1795188628") == 1795188628.0


def test_a_job_is_asked_for_in_seconds_since_the_epoch_and_in_the_c_locale(stubs: Stubs) -> None:
    stubs.add("scontrol", RUNNING)
    assert stubs.slurm(SQUEUE_FORMAT="%A", LANG="de_DE.UTF-8").show_job("1").job_id == "1"
    assert stubs.calls("scontrol") == ["show job 1"]
    environ = stubs.environ("scontrol")
    assert (environ["LC_ALL"], environ["SLURM_TIME_FORMAT"]) == ("C", "%s")
    assert "SQUEUE_FORMAT" not in environ


def test_of_an_array_the_element_asked_for_is_shown(stubs: Stubs) -> None:
    stubs.add("scontrol", REST + "\n" + ELEMENT)
    assert stubs.slurm().show_job("2_1").job_id == "4"


def test_a_job_that_the_controller_has_forgotten_is_none(stubs: Stubs) -> None:
    stubs.add("scontrol", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    assert stubs.slurm().show_job("999") is None


def test_all_jobs_are_asked_for_in_one_call(stubs: Stubs) -> None:
    stubs.add("squeue", "1|RUNNING|node[1-3]|1795188629|None\n2_1|PENDING||N/A|Priority\n7_3|COMPLETING|node1||None\n")
    found = stubs.slurm().show_jobs(["1", "2_1", "7_3"])
    assert found == {
        "1": JobStatus("1", "RUNNING", None, "node[1-3]", 1795188629.0),
        "2_1": JobStatus("2_1", "PENDING", "Priority"),
        "7_3": JobStatus("7_3", "COMPLETING", None, "node1"),
    }
    assert len(stubs.calls("squeue")) == 1


def test_only_jobs_that_the_controller_has_forgotten_are_asked_of_accounting(stubs: Stubs) -> None:
    stubs.add("squeue", "1|RUNNING|node1||None\n")
    stubs.add("sacct", "8|CANCELLED by 1000|node2|0:15\n")
    found = stubs.slurm().show_jobs(["1", "8", "9"])
    assert {job_id: status and status.state for job_id, status in found.items()} == {
        "1": "RUNNING",
        "8": "CANCELLED",
        "9": None,
    }
    assert [call.split("--jobs=")[1] for call in stubs.calls("sacct")] == ["8,9"]


def test_accounting_tells_the_exit_code_of_a_job_that_the_controller_has_forgotten(stubs: Stubs) -> None:
    stubs.add("squeue", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    stubs.add("sacct", "8|FAILED|node[1-2]|75:0\n")
    assert stubs.slurm().show_jobs(["8"]) == {"8": JobStatus("8", "FAILED", node_list="node[1-2]", exit_code=75)}


def test_without_accounting_a_forgotten_job_is_unknown_and_not_dead(stubs: Stubs) -> None:
    stubs.add("squeue", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    stubs.add("sacct", stderr="Slurm accounting storage is disabled", code=1)
    assert stubs.slurm().show_jobs(["8"]) == {"8": None}


def test_of_several_jobs_squeue_is_asked_for_those_of_the_user(stubs: Stubs) -> None:
    """For several ids it would load the cluster's jobs. Old versions would also fail for one unknown id."""
    stubs.add("squeue", "1|RUNNING|node1||None\n7_3|PENDING|||Priority\n7_4|PENDING||1800000000|Priority\n")
    stubs.add("sacct")
    found = stubs.slurm().show_jobs(["1", "7_4", "8"])
    assert found["1"] == JobStatus("1", "RUNNING", None, "node1")
    assert found["7_4"] == JobStatus("7_4", "PENDING", "Priority", "", 1_800_000_000.0)
    (call,) = stubs.calls("squeue")
    assert "--user=" in call
    assert "--jobs" not in call


def test_a_whole_array_is_over_only_when_its_last_element_is(stubs: Stubs) -> None:
    stubs.add("squeue", "7_0|COMPLETED|n1||None\n7_1|RUNNING|n1||None\n7_2|FAILED|n1||None\n")
    assert not stubs.slurm().show_jobs(["7"])["7"].is_over


def test_asking_for_nothing_asks_nobody(stubs: Stubs) -> None:
    assert stubs.slurm().show_jobs([]) == {}


def test_sbatch_returns_the_id_and_hands_on_nothing_of_the_job_we_are_in(stubs: Stubs) -> None:
    stubs.add("sbatch", "123;cluster\n")
    slurm = stubs.slurm(SLURM_CPU_BIND="quiet", SLURM_JOB_ID="1", RANK="0", SLURM_CONF="/etc/s.conf")
    assert slurm.sbatch(["--nodes=2", "job file.sh"]) == "123"
    assert stubs.calls("sbatch") == ["--parsable --nodes=2 job file.sh"]
    environ = stubs.environ("sbatch")
    assert environ["SLURM_CONF"] == "/etc/s.conf"
    assert not environ.keys() & {"SLURM_CPU_BIND", "SLURM_JOB_ID", "RANK", "LC_ALL", "SLURM_TIME_FORMAT"}


@pytest.mark.parametrize("garbage", ["no rows\n", "|||\n", "\0\n"])
def test_an_answer_that_is_no_answer_tells_of_no_job(stubs: Stubs, garbage: str) -> None:
    """A job that is not in it is not taken for one that is over."""
    for program in ("squeue", "scontrol", "sacct"):
        stubs.add(program, garbage)
    slurm = stubs.slurm()
    for ask in (
        lambda: slurm.show_jobs(["7"]),
        lambda: slurm.show_jobs(["7", "8"]),
        lambda: slurm.show_job("7"),
        lambda: slurm.job_of_script("/job.sh"),
    ):
        with pytest.raises(SlurmError, match="printed, instead of"):
            ask()


def test_a_job_is_cancelled_whole_and_a_step_by_its_name(stubs: Stubs) -> None:
    stubs.add("scancel")
    slurm = stubs.slurm()
    slurm.cancel("5")
    slurm.cancel("5", signal="KILL", step="0")
    slurm.cancel("5", signal="USR1", batch=True)
    assert stubs.calls("scancel") == ["5", "--signal=KILL 5.0", "--signal=USR1 --batch 5"]


#: Slurm 22.05's.
STEP = """StepId=2_1.{number} UserId=0 StartTime=2026-11-22T02:46:47 TimeLimit=UNLIMITED
   State=RUNNING Partition=main NodeList=node1
   Nodes=1 CPUs=1 Tasks=1 Name={name} Network=(null)
   TRES=cpu=1,mem=0,node=1
   ResvPorts=(null)
   CPUFreqReq=Default Dist=Cyclic
   SrunHost:Pid=node1:75

"""


def test_a_step_is_found_by_its_name_without_asking_for_those_of_other_jobs(stubs: Stubs) -> None:
    steps = {"batch": "batch", "0": "r.1", "1": "r.11"}
    stubs.add("scontrol", "".join(STEP.format(number=number, name=name) for number, name in steps.items()))
    slurm = stubs.slurm()
    assert [slurm.find_step("2_1", name) for name in ("r.1", "r.11", "r.2", "batch")] == ["0", "1", None, "batch"]
    assert set(stubs.calls("scontrol")) == {"show step 2_1"}


def test_a_job_without_steps_has_none_of_any_name(stubs: Stubs) -> None:
    stubs.add("scontrol", "Job step 2_1. not found\n", code=1)
    assert stubs.slurm().find_step("2_1", "r.1") is None
    stubs.add("scontrol", stderr="slurm_get_job_steps error: Invalid job id specified\n", code=1)
    assert stubs.slurm().find_step("2_1", "r.1") is None
    stubs.add("scontrol", stderr="slurm_load_ctl_conf error: Zero Bytes were transmitted or received\n", code=1)
    with pytest.raises(SlurmError, match="Zero Bytes"):
        stubs.slurm().find_step("2_1", "r.1")


def test_a_requeue_that_slurm_has_done_already_is_no_error(stubs: Stubs) -> None:
    stubs.add("scontrol", stderr="Job is pending execution for job 2_1", code=1)
    stubs.slurm().requeue("2_1")
    assert stubs.calls("scontrol") == ["requeue 2_1"]


def test_a_requeue_that_slurm_refuses_says_why_and_what_to_do(stubs: Stubs) -> None:
    stubs.add("scontrol", stderr="Requested operation is presently disabled for job 5", code=1)
    with pytest.raises(SlurmError, match=r"(?s)scontrol requeue 5.*exit code 1.*disabled.*What to do"):
        stubs.slurm().requeue("5")


def test_a_missing_program_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="`scontrol` is not on PATH"):
        Slurm({"PATH": str(tmp_path)}).show_job("1")


def test_a_program_that_does_not_answer_is_ended_and_named(stubs: Stubs) -> None:
    stubs.add("squeue", before="exec sleep 60")
    with pytest.raises(SlurmError, match=r"did not answer within 0\.1 s"):
        stubs.slurm(timeout_s=0.1).show_jobs(["1"])


def test_a_failure_shows_the_last_words_of_stderr(stubs: Stubs) -> None:
    stubs.add("scancel", stderr="".join(f"line {n}\n" for n in range(9)), code=3)
    with pytest.raises(SlurmError, match=r"(?s)exit code 3:\n  line 4.*line 8") as caught:
        stubs.slurm().cancel("1")
    assert "line 3" not in str(caught.value)


def test_slurm_is_available_where_sbatch_exists_and_a_controller_is_up(stubs: Stubs) -> None:
    assert not stubs.slurm().available()
    stubs.add("sbatch")
    assert not stubs.slurm().available()
    stubs.add("scontrol", "Slurmctld(primary) at a is DOWN\n")
    assert not stubs.slurm().available()
    stubs.add("scontrol", "Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP\n")
    assert stubs.slurm().available()


def test_half_an_installation_is_noticed_within_the_time_limit(stubs: Stubs) -> None:
    stubs.add("sbatch")
    stubs.add("scontrol", before="exec sleep 60")
    assert not stubs.slurm(timeout_s=0.1).available()


def test_a_step_says_everything_on_its_command_line() -> None:
    step = SrunStep(["python", "a b.py"], ["n1", "n3", "n1"], 2, "logs/rank-%t.log", mpi="pmix", overlap=True)
    assert srun_argv(step) == [
        "srun",
        "--ntasks=3",
        "--cpus-per-task=2",
        "--distribution=arbitrary",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--output=logs/rank-%t.log",
        "--open-mode=append",
        "--export=ALL",
        "--mpi=pmix",
        "--overlap",
        "python",
        "a b.py",
    ]


REMOVED_FOR_STEPS = """SLURM_NNODES SLURM_JOB_NUM_NODES SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NPROCS SLURM_HOSTFILE
SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_DISTRIBUTION SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_MEM_PER_NODE
SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_GPU_BIND SLURM_TRES_BIND SLURM_GRES_FLAGS
SLURM_MEM_PER_CPU SRUN_CPUS_PER_TASK PMIX_RANK PMI_FD RANK"""


def test_a_step_that_only_looks_shares_everything_and_speaks_to_its_caller() -> None:
    argv = srun_argv(SrunStep(["true"], ["node1"], None, None, overlap=True, extra=["--label"]))
    assert {"--overlap", "--label"} <= set(argv)
    assert not [word for word in argv if word.startswith(("--cpus-per-task", "--output", "--open-mode"))]


def test_what_contradicts_a_shrunken_allocation_is_removed_for_a_step() -> None:
    kept = {"SLURM_JOB_ID": "1", "SLURM_CONF": "x", "SLURM_JOB_NODELIST": "n1", "PATH": "/bin", "MASTER_PORT": "1"}
    assert step_environment({**kept, **dict.fromkeys(REMOVED_FOR_STEPS.split(), "9")}) == kept


def test_a_submission_keeps_slurms_site_and_nothing_of_a_job() -> None:
    kept = {"SLURM_CONF": "x", "SLURM_CLUSTERS": "a", "PATH": "/bin", "HOME": "/h", "OMPI_MCA_btl": "tcp"}
    job = "SLURM_JOB_ID SBATCH_PARTITION SRUN_DEBUG PMI_RANK PMIX_RANK SLURMD_NODENAME WORLD_SIZE TORCHELASTIC_RUN_ID"
    assert submit_environment({**kept, **dict.fromkeys(job.split(), "1")}) == kept


def test_importing_the_package_is_cheap_and_brings_neither_torch_nor_submitit() -> None:
    code = (
        "import sys, json, toolkit.slurm.commands, toolkit.slurm.placement, toolkit.slurm.network; "
        "print(json.dumps([m for m in ('torch', 'submitit', 'numpy', 'asyncio') "
        "if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert json.loads(done.stdout) == []


def test_a_program_that_a_signal_ends_has_not_been_refused(stubs: Stubs) -> None:
    stubs.add("scontrol", before="kill -KILL $$")
    with pytest.raises(SlurmError) as caught:
        stubs.slurm().exclude_nodes("1", "node3")
    assert not isinstance(caught.value, SlurmRefusedError)


@pytest.mark.parametrize(
    ("preempt_type", "preempt_mode", "partition", "qos", "cancels"),
    [
        ("preempt/partition_prio", "REQUEUE", "PreemptMode=CANCEL", None, True),
        ("preempt/partition_prio", "CANCEL", "PreemptMode=REQUEUE", None, False),
        ("preempt/partition_prio", "GANG,SUSPEND", "PreemptMode=GANG,SUSPEND", None, False),
        ("preempt/qos", "REQUEUE", "PreemptMode=CANCEL", "cancel", True),
        ("preempt/qos", "CANCEL", "PreemptMode=REQUEUE", "cluster", True),
        ("preempt/qos", "CANCEL", "PreemptMode=CANCEL", "requeue", False),
        ("preempt/qos", "REQUEUE", "PreemptMode=OFF", None, True),  # accounting cannot be asked from here: it may
        ("preempt/qos", "CANCEL", "PreemptMode=REQUEUE", "requeue\ncluster", True),  # of several it gets one later
        ("preempt/none", "OFF", "PreemptMode=CANCEL", "cancel", False),
    ],
)
def test_what_a_preemption_does_is_the_partitions_the_qoss_or_the_clusters_word(
    stubs: Stubs, preempt_type: str, preempt_mode: str, partition: str, qos: str | None, cancels: bool
) -> None:
    """As `scontrol show config`, `scontrol show partition` and sacctmgr of 22.05 and 24.11 print it."""
    stubs.add(
        "scontrol", stdout=f"PreemptMode             = {preempt_mode}\nPreemptType             = {preempt_type}\n"
    )
    settings = stubs.slurm().settings()
    assert (settings.preempt_type, settings.preempt_mode) == (preempt_type, preempt_mode)
    stubs.add(
        "scontrol", stdout=f"PartitionName=gpu\n   MaxNodes=UNLIMITED\n   OverTimeLimit=NONE {partition}\n   State=UP\n"
    )
    stubs.add("sacctmgr", stdout=f"{qos}\n", code=int(qos is None))
    (row,) = parse_jobs("JobId=1 JobName=wrap\n   Account=a QOS=high\n   Partition=gpu AllocNode:Sid=login:1\n")
    assert stubs.slurm().preemption_cancels(row, settings) is cancels


#: What `scontrol show config` and `sbatch --help` say (src/scontrol/info_config.c, src/sbatch/opt.c).
CONFIG = "SlurmctldParameters     = {}\nSLURM_CONF              = /etc/slurm.conf\nSLURM_VERSION           = {}\n"
HELP = "      --reboot               reboot compute nodes before starting job\n{}\n"
NEW, OLD = "      --requeue[=expedite]   if set, permit", "      --requeue              if set, permit"
ALLOWED = "idle_on_node_suspend,enable_expedited_requeue"


@pytest.mark.parametrize(
    ("parameters", "version", "line", "expedites"),
    [
        (ALLOWED, "25.11.3", NEW, True),
        (ALLOWED, "26.05.0-rc1", NEW, True),
        (ALLOWED, "25.11.2", NEW, False),  # there a job that ends well is held, too
        (ALLOWED, "26.05.1", OLD, False),  # the login node has older programs
        ("(null)", "26.05.1", NEW, False),
    ],
)
def test_a_requeue_is_expedited_where_the_site_allows_it_and_sbatch_knows_it(
    stubs: Stubs, parameters: str, version: str, line: str, expedites: bool
) -> None:
    stubs.add("scontrol", stdout=CONFIG.format(parameters, version))
    stubs.add("sbatch", stdout=HELP.format(line))
    assert stubs.slurm().expedites() is expedites


def test_a_job_that_asks_for_an_expedited_requeue_says_so(stubs: Stubs) -> None:
    shown = "JobId=1 JobName=wrap\n   JobState=RUNNING\n   Requeue=1 Restarts=0\n   ExpeditedRequeue=Yes\n"
    assert parse_jobs(shown)[0].is_expedited
    assert not parse_jobs(RUNNING)[0].is_expedited
    stubs.add("scontrol")
    stubs.slurm().forbid_requeue("7")
    assert stubs.calls("scontrol") == ["update JobId=7 Requeue=0"]


def test_jobs_of_a_list_that_slurm_has_forgotten_are_no_error(stubs: Stubs) -> None:
    stubs.add("scancel", stderr="scancel: error: Kill job error on job id 7: Invalid job id specified", code=1)
    stubs.slurm().cancel_waiting(["7", "8"])
    assert stubs.calls("scancel") == ["--state=PENDING 7 8"]
    stubs.add("scancel", stderr="scancel: error: Kill job error on job id 7: Access/permission denied", code=1)
    with pytest.raises(SlurmRefusedError, match="permission denied"):
        stubs.slurm().cancel_waiting(["7", "8"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NumNodes=2 \n   AllocTRES=cpu=8,mem=3G,node=2", 3 << 29),  # Slurm 23.11 and later
        ("NumNodes=2-4 \n   TRES=cpu=8,mem=1500M,node=2", 750 << 20),
        ("NumNodes=1 \n   TRES=cpu=1,node=1\n   MinMemoryNode=500M", 500 << 20),
        ("NumNodes=1 \n   TRES=cpu=1,mem=0,node=1", None),
        ("NumNodes=1 \n   MinMemoryNode=?", None),
    ],
)
def test_slurms_answer_about_a_job_tells_the_memory_of_a_node(text: str, expected: int | None) -> None:
    (row,) = parse_jobs(f"JobId=7\n   JobState=RUNNING\n   {text}\n")
    assert row.memory_bytes == expected


@pytest.mark.parametrize(
    ("setup", "option"),
    [
        (["module load cuda", "ulimit -n 65536"], ["--propagate=NOFILE"]),
        (["ulimit -Sn 4096 -c 0; ulimit -s unlimited && true"], ["--propagate=NOFILE,CORE,STACK"]),
        (["ulimit 1000"], ["--propagate=FSIZE"]),
        (["ulimit -n $(ulimit -Hn)  # -v"], ["--propagate=NOFILE"]),
        (["export NAME=multiulimit", "ulimits -n 5"], []),
    ],
)
def test_a_step_has_the_limits_that_the_setup_sets(setup: list[str], option: list[str]) -> None:
    assert limit_options(setup) == option


def test_a_job_that_another_cluster_has_started_ends_there() -> None:
    """Accounting keeps the state when that is over, and has an exit code."""
    assert not JobStatus("1", "REVOKED").is_over
    assert JobStatus("1", "REVOKED", exit_code=0).is_over


MANUAL = """
BF BOOT_FAIL, CA CANCELLED, CD COMPLETED, CF CONFIGURING, CG COMPLETING, DL DEADLINE, F FAILED, NF NODE_FAIL,
OOM OUT_OF_MEMORY, PD PENDING, PR PREEMPTED, R RUNNING, RD RESV_DEL_HOLD, RF REQUEUE_FED, RH REQUEUE_HOLD, RQ REQUEUED,
RS RESIZING, RV REVOKED, SI SIGNALING, SE SPECIAL_EXIT, SO STAGE_OUT, ST STOPPED, S SUSPENDED, TO TIMEOUT
"""
CODES = dict(entry.split() for entry in MANUAL.split(","))

UNFINISHED = """
CONFIGURING COMPLETING SUSPENDED RESIZING REQUEUED SIGNALING STAGE_OUT SPECIAL_EXIT STOPPED REQUEUE_HOLD REQUEUE_FED
RESV_DEL_HOLD PENDING RUNNING POWER_UP_NODE LAUNCH_FAILED RECONFIG_FAIL REVOKED
"""


@pytest.mark.parametrize(("code", "state"), CODES.items())
def test_every_state_of_the_manual_is_classed_by_name_and_by_code(code: str, state: str) -> None:
    assert phase(state) is phase(code) is not Phase.UNKNOWN
    assert canonical(code) == state


@pytest.mark.parametrize("state", sorted({*CODES.values(), *UNFINISHED.split()}))
def test_an_unfinished_state_is_never_taken_for_the_end_and_an_end_is_one(state: str) -> None:
    assert is_over(state) is (state not in UNFINISHED.split())


@pytest.mark.parametrize("state", ["CANCELLED by 1000", "CANCELLED+", "CANCELLED", "cancelled", "CA"])
def test_the_spellings_of_cancelled_are_one_state(state: str) -> None:
    assert canonical(state) == "CANCELLED"
    assert phase(state) is Phase.ENDED_BADLY


@pytest.mark.parametrize("state", [None, "", "?", "A_STATE_OF_2031"])
def test_an_unknown_state_is_never_over(state: str | None) -> None:
    assert phase(state) is Phase.UNKNOWN
    assert not is_over(state)


def test_codes_are_distinct() -> None:
    codes = [code for code, _ in states._STATES.values() if code]
    assert len(set(codes)) == len(codes) == len(CODES)
