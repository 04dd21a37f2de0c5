"""A cluster's description of itself, as `toolkit doctor` shows it and `init` uses it."""

import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.config import JobConfig, load_config, validate
from toolkit.config.schema import SCRIPT_JOB
from toolkit.plugins.site import doctor, reservations
from toolkit.plugins.site.site_profile import SiteProfile, read_site
from toolkit.slurm.commands import Slurm

#: `scontrol show config` of Slurm 24.11.5, the lines that count, of a site as many are.
CONFIG = """Configuration data as of 2026-11-24T11:34:42
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = alps
EnforcePartLimits       = NO
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 10001
MaxJobCount             = 50000
MpiDefault              = (null)
PreemptMode             = REQUEUE
PreemptType             = preempt/qos
ProctrackType           = proctrack/cgroup
SlurmctldParameters     = (null)
SLURM_VERSION           = 24.11.5
TaskPlugin              = task/cgroup,task/affinity

Cgroup Support Configuration:
CgroupPlugin            = cgroup/v2
ConstrainCores          = yes
ConstrainDevices        = yes
ConstrainRAMSpace       = no

Slurmctld(primary) at login is UP
"""
PARTITIONS = """PartitionName=normal
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=2 MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE

PartitionName=debug
   AllowGroups=ALL AllowAccounts=lab2 AllowQos=ALL
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE GraceTime=120 MaxNodes=UNLIMITED MaxTime=UNLIMITED PriorityTier=1 PreemptMode=OFF
   State=DOWN TotalCPUs=64 TotalNodes=1 SelectTypeParameters=NONE
"""
SINFO = "normal|1|128|512000|(null)\nnormal|3|64|256000|gpu:a100:4(S:0-1),nvme:1\ndebug|1|64|256000|(null)\n"
ASSOCIATIONS = "lab1||normal,low|normal||200|\nlab2|debug|normal||4||02:00:00\n"
QOS = "normal||cluster|00:00:00||\nlow|2-00:00:00|cancel|00:05:00|gres/gpu=8|20\n"


class Programs:
    """Slurm's programs on PATH. Each answers by the words of its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("srun", "squeue", "scancel"):
            self.add(name, {"--mpi=list": "MPI plugin types are...\n\tnone\n\tpmix\nspecific: pmix_v5\n"})
        self.add("sbatch", {"--help": "--requeue[=expedite]"})
        self.add("sinfo", {"": SINFO})
        self.scontrol(CONFIG)
        self.add("sacctmgr", {"associations": ASSOCIATIONS, "show user": "lab1\n", "show qos": QOS})

    def scontrol(self, config: str, partitions: str = PARTITIONS) -> None:
        ping = "Slurmctld(primary) at login is UP\n"
        self.add("scontrol", {"ping": ping, "show config": config, "show partition": partitions})

    def add(self, name: str, answers: Mapping[str, str], code: int = 0, stderr: str = "") -> None:
        cases = "".join(f'*"{words}"*) printf %s {shlex.quote(text)};;\n' for words, text in answers.items())
        end = f"printf %s {shlex.quote(stderr)} >&2\nexit {code}\n"
        (self.folder / name).write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n{end}')
        (self.folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Put Slurm's programs on PATH, with a home folder for the test alone."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TOOLKIT_SITE", raising=False)
    return Programs(tmp_path / "bin")


def test_an_empty_setting_does_not_take_the_next_line_for_its_value(programs: Programs) -> None:
    programs.scontrol(CONFIG.replace("(null)", ""))
    profile = read_site(Slurm())
    assert (profile.mpi_default, profile.cluster, profile.preempt_mode) == ("none", "alps", "REQUEUE")
    assert profile.slurm == "24.11.5"


def test_a_site_is_read_with_its_limits_accounts_and_preemption(programs: Programs) -> None:
    profile = read_site(Slurm())
    assert (profile.cluster, profile.slurm, profile.notes) == ("alps", "24.11.5", ())
    assert (profile.requeue_delay_s, profile.max_array_size, profile.max_jobs) == (121.0, 10_001, 50_000)
    assert profile.cgroup == "cgroup/v2, constrains Cores, Devices"
    assert (profile.mpi_plugins, profile.mpi_default) == (("pmix", "pmix_v5"), "none")
    normal, debug = profile.partitions
    assert (normal.is_default, normal.nodes, normal.max_nodes) == (True, 4, 2)
    assert (normal.time_limit_s, normal.default_time_s) == (86_400.0, 3_600.0)
    assert (normal.cpus, normal.memory_mb, normal.gpus, normal.gpu_type) == (64, 256_000, 4, "a100")
    assert (debug.is_up, debug.accounts, debug.grace_s, debug.time_limit_s) == (False, ("lab2",), 120.0, None)
    lab1, lab2 = profile.associations
    assert (lab1.account, lab1.qos, lab1.max_submit) == ("lab1", ("normal", "low"), 200)
    assert (lab2.partition, lab2.max_jobs, lab2.time_limit_s) == ("debug", 4, 7_200.0)
    low = profile.qos[1]
    assert (low.preempt_mode, low.grace_s, low.max_resources, low.max_submit) == ("cancel", 300.0, "gres/gpu=8", 20)


def test_hidden_partitions_are_known_too(programs: Programs) -> None:
    hidden = PARTITIONS.replace("PartitionName=debug", "PartitionName=secret")
    programs.add("scontrol", {"--all show partition": hidden, "show partition": PARTITIONS, "show config": CONFIG})
    programs.add("sinfo", {"--all": SINFO.replace("debug", "secret"), "": SINFO})
    assert [(part.name, part.cpus) for part in read_site(Slurm()).partitions] == [("normal", 64), ("secret", 64)]


def test_what_cannot_be_read_is_a_note_and_no_error(programs: Programs) -> None:
    programs.add("sacctmgr", {}, code=1, stderr="sacctmgr: error: Access/permission denied\n")
    programs.add("sinfo", {}, code=1, stderr="slurm_load_node: Zero Bytes were transmitted or received\n")
    (programs.folder / "srun").unlink()
    profile = read_site(Slurm())
    notes = "\n".join(profile.notes)
    assert "srun is not on PATH" in notes
    assert "the nodes' sizes cannot be read" in notes
    assert "accounts and QOS cannot be read: sacctmgr: error: Access/permission denied" in notes
    assert [part.name for part in profile.partitions] == ["normal", "debug"]
    assert profile.accounting == "no answer: sacctmgr: error: Access/permission denied"


def test_without_accounting_sacctmgr_is_not_asked(programs: Programs) -> None:
    programs.scontrol(CONFIG.replace("accounting_storage/slurmdbd", "accounting_storage/none"))
    (programs.folder / "sacctmgr").unlink()
    profile = read_site(Slurm())
    assert (profile.accounting, profile.notes, profile.associations) == ("off", (), ())


def test_half_a_slurm_and_a_silent_controller_are_said(
    programs: Programs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add("scontrol", {"ping": "Slurmctld(primary) at login is DOWN\n"})
    assert main(["doctor", "--site"]) == 0
    assert "controller does not answer" in capsys.readouterr().out
    (programs.folder / "scontrol").unlink()
    assert main(["doctor", "--site"]) == 0
    assert "only half installed here: not on PATH: scontrol" in capsys.readouterr().out
    assert main(["site", "init"]) == 2
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "--site", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["site"], answer["why_no_site"][:14]) == (None, "no Slurm here:")
    assert not Path(os.environ["HOME"]).exists()


def test_the_page_fits_a_terminal_and_says_what_a_user_needs(
    programs: Programs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--site"]) == 0
    page = capsys.readouterr().out
    assert "a job over its partition's limits is held in the queue for ever" in page
    assert "may start again after 121 s" in page
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--site"]) == 0
    assert max(map(len, capsys.readouterr().out.replace(os.environ["HOME"], "~").splitlines())) <= 80


def test_that_requeues_are_expedited_or_forbidden_is_said() -> None:
    profile = SiteProfile(cluster="alps", expedites=True)
    assert "at once, with --requeue=expedite" in next(doctor.lines(profile))
    assert "forbidden by default" in next(doctor.lines(replace(profile, can_requeue=False)))
    assert "arrays: switched off; " in "\n".join(doctor.lines(replace(profile, max_array_size=0)))


def test_init_writes_defaults_that_are_valid_and_keeps_what_is_there(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "init", "--print"]) == 0
    path = Path(os.environ["HOME"]) / ".config/toolkit/site.yaml"
    assert not path.exists()
    assert main(["site", "init"]) == 0
    assert path.read_text() in capsys.readouterr().out
    config = load_config(None, [f"job={SCRIPT_JOB}"])
    validate(config)
    cluster = config.cluster
    assert (cluster.partition, cluster.account, cluster.qos, cluster.time_min) == ("normal", "lab1", "normal", 60)
    assert cluster.save_before_limit_s == JobConfig().cluster.save_before_limit_s
    assert "#   gpus_per_node: 4\n#   gpu_type: a100" in path.read_text()
    path.write_text("cluster: {account: mine}\n")
    assert main(["site", "init"]) == 2
    assert "already exists and is kept" in capsys.readouterr().err
    assert path.read_text() == "cluster: {account: mine}\n"
    assert main(["site", "init", "--force", "--partition", "debug"]) == 0
    assert "partition: debug" in path.read_text()
    assert "account: lab2" in path.read_text()


def test_init_says_why_it_names_no_account(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.add("sacctmgr", {"show qos": QOS})
    assert main(["site", "init", "--print"]) == 0
    assert "# account, qos: Slurm lists none for you\n" in capsys.readouterr().out
    programs.scontrol(CONFIG.replace("accounting_storage/slurmdbd", "accounting_storage/none"))
    assert main(["site", "init", "--print"]) == 0
    assert "# account, qos: accounting is off\n" in capsys.readouterr().out


def test_init_refuses_an_unknown_partition_with_the_nearest(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "init", "--partition", "debgu"]) == 2
    assert "--partition: unknown partition 'debgu'; did you mean 'debug'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "begins_min", "nodes", "says"),
    [
        ("", 6.9, "node[1-4]", "maint begins in 6 min .* on 4 of the 4 nodes here: a job of 30 min waits"),
        ("", 6.9, "node[1-4]", "with cluster.time_min=5 it can start before"),
        ("", -5, "node[1-4]", "has begun, .* waits for its end, "),
        ("cluster.nodes=3", 6.9, "node[1-2]", "on 2 of the 4 nodes here"),
        ("cluster.nodes=2", 6.9, "node[1-2]", ""),
        ("cluster.partition=other", 6.9, "node[1-4]", ""),
        ("cluster.time_min=5", 6.9, "node[1-4]", ""),
        ("cluster.extra.reservation=maint", 6.9, "node[1-4]", ""),
    ],
)
def test_a_reservation_that_holds_the_job_back_is_named_with_the_time_that_fits(
    given: str,
    begins_min: float,
    nodes: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, end = (round(time.time() + 60 * at) for at in (begins_min, 60))
    times = f"ReservationName=maint StartTime={begin} EndTime={end} Duration=00:54:00\n   Nodes={nodes} NodeCnt=4"
    answers = {
        "scontrol": f"{times} Flags=MAINT\n\n{times.replace(nodes, '(null)')}\n",
        "sinfo": "norm*|node[1-4]\nother|n9\n",
    }
    monkeypatch.setattr(Slurm, "ask", lambda self, argv: answers[argv[0]])
    reservations._holding_back.cache_clear()
    told = reservations.holding_back(load_config(None, given.split(), site=False).cluster)
    assert re.search(says, told) if says else told == ""
