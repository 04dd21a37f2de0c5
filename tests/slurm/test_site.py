"""The report of `toolkit doctor` on a site, beside its slurm.conf and a proof run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box
from tests.slurm.conftest import BoxFactory, visit
from tests.slurm.site import Site
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

PROVE_S = 240


def doctor(site: Site, *arguments: str, timeout_s: float = PROVE_S, **env: str) -> dict[str, Any]:
    """What it prints as JSON, with its exit code. The user's home is the story's folder."""
    env = {"HOME": str(site.folder), "TOOLKIT_RUNS": str(site.runs), **env}
    argv = ["toolkit", "doctor", "--json", *arguments]
    done = site.box.run(argv, env=env, user=site.user, cwd=site.folder, check=False, timeout=timeout_s)
    assert done.stdout, done.stderr
    return {"code": done.returncode, "log": done.stderr, **json.loads(done.stdout)}


def conf(box: Box) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The settings of slurm.conf, and those of each partition."""
    lines = (box.box_dir / "etc/slurm.conf").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"\w+=\S", line) and " " not in line)
    partitions = [dict(word.split("=", 1) for word in line.split()) for line in lines if line.startswith("Part")]
    return settings, {each["PartitionName"]: each for each in partitions}


def test_the_site_is_as_slurm_conf_has_it_and_init_makes_defaults_of_it(site: Site) -> None:
    answer = doctor(site, "--site")
    profile, (settings, partitions) = answer["site"], conf(site.box)
    assert answer["code"] == 0
    assert profile["cluster"] == settings["ClusterName"]
    assert profile["slurm"].startswith(site.box.spec.slurm)
    assert profile["requeue_delay_s"] == 1 + float(settings["AuthInfo"].partition("cred_expire=")[2])
    assert profile["kill_wait_s"] == float(settings["KillWait"])
    assert (profile["proctrack"], profile["preempt_type"]) == (settings["ProctrackType"], settings["PreemptType"])
    assert {*profile["task_plugins"].split(",")} == {*settings["TaskPlugin"].split(",")}
    assert (profile["accounting"], profile["notes"]) == ("on", [])
    assert ("cgroup" in str(profile["cgroup"])) == site.box.spec.strict
    assert {"pmix", "pmi2"} <= {*profile["mpi_plugins"]}
    seen = {part["name"]: part for part in profile["partitions"]}
    assert seen.keys() == partitions.keys() - {"DEFAULT"}
    for name, part in seen.items():
        assert part["preempt_mode"] == partitions[name]["PreemptMode"]
        assert (part["tier"], part["grace_s"]) == (
            int(partitions[name]["PriorityTier"]),
            float(partitions[name].get("GraceTime", 0)),
        )
        assert (part["nodes"], part["cpus"]) == (site.box.spec.nodes, site.box.spec.cpus)
        assert (part["memory_mb"], part["gpus"]) == (site.box.spec.memory_mb, 2 * site.box.spec.strict)
    # A submission uses these defaults.
    home = str(site.folder)
    site.run("toolkit", "site", "init", HOME=home)
    dry_run = ["toolkit", "submit", "configs/digits_ddp.yaml", "--dry-run"]
    assert "#SBATCH --partition=main" in site.run(*dry_run, HOME=home)


def test_a_job_that_slurm_would_hold_for_ever_is_named_as_soon_as_it_is_queued(site: Site) -> None:
    too_many = f"cluster.nodes={site.box.spec.nodes + 1}"
    refused = site.run("toolkit", "exec", too_many, "--name", "large", "--", "true", check=False)
    assert re.search(r"is queued and may never start|node configuration is not available", refused)
    site.box.run(["scontrol", "update", "PartitionName=main", "MaxTime=10"])
    try:
        told = site.run("toolkit", "exec", "cluster.time_min=20", "--name", "long", "--", "true")
        assert re.search(r"may never start: .* \(Partition(TimeLimit|Config)\); `toolkit cancel", told)
        site.run("toolkit", "cancel", "long")
    finally:
        site.box.run(["scontrol", "update", "PartitionName=main", "MaxTime=UNLIMITED"])


def test_without_accounting_the_rest_of_the_site_is_read(site: Site) -> None:
    """As where a user may not ask the database: sacctmgr fails, and says so."""
    folder = site.folder / "bin"
    folder.mkdir(mode=0o755)
    (folder / "sacctmgr").write_text("#!/bin/sh\necho 'Access/permission denied' >&2; exit 1\n")
    (folder / "sacctmgr").chmod(0o755)
    path = site.box.run(["sh", "-c", "echo $PATH"], user=site.user).stdout.strip()
    profile = doctor(site, "--site", PATH=f"{folder}:{path}")["site"]
    assert profile["notes"] == ["accounts and QOS cannot be read: Access/permission denied"]
    assert [part["name"] for part in profile["partitions"]] == ["main", "high", "cancel"]


def proofs_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {proof["name"]: proof for proof in answer["proofs"]}


def test_a_run_on_two_nodes_proves_what_the_site_promises(site: Site) -> None:
    answer = doctor(site, "--prove")
    proofs = proofs_of(answer)
    assert {name: proof["is_proven"] for name, proof in proofs.items()} == dict.fromkeys(
        [
            *("start of ranks", "interface", "all-reduce"),
            *("renamed files", "atomic replacement", "file locks", "file times"),
            *("signals", "coming back", "sbatch on a node", "follow-up job", "srun after a loss"),
        ],
        True,
    ), answer
    assert answer["code"] == 0
    assert proofs["interface"]["text"].startswith("eth0; backend gloo")
    assert proofs["coming back"]["text"].startswith("requeued")
    waited_s = float(re.search(r"after (\d+) s", proofs["coming back"]["text"])[1])
    assert waited_s >= answer["site"]["requeue_delay_s"] - 2
    assert not list(site.runs.glob("doctor/*"))  # a run that has proven all is removed


@pytest.mark.soak
def test_the_evidence_of_two_nodes_has_a_preemption_and_a_spare(site: Site) -> None:
    answer = doctor(site, "--prove", "--gpus", "--nodes", "2", timeout_s=1200)
    proofs = proofs_of(answer)
    untried = {name for name, proof in proofs.items() if proof["is_proven"] is None}
    assert untried == {"matrix products", "copies from the host", "other interfaces"}, answer
    assert answer["code"] == 0, answer
    assert proofs["preempt and resume, bit for bit"]["text"] == "30 steps after 1 resumes: IDENTICAL"
    assert proofs["spare node used"]["text"] == "1 nodes replaced"


@pytest.fixture
def without_requeue(make_box: BoxFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A user of a site that forbids requeues."""
    box = make_box(nodes=2)
    path = Path(box.box_dir / "etc/slurm.conf")
    path.write_text(path.read_text().replace("JobRequeue=1", "JobRequeue=0"))
    box.run(["scontrol", "reconfigure"])
    yield from visit(box, request)


@pytest.mark.soak
def test_a_site_without_requeue_is_told_that_follow_up_jobs_continue(without_requeue: Site) -> None:
    answer = doctor(without_requeue, "--prove")
    assert answer["site"]["can_requeue"] is False
    back = proofs_of(answer)["coming back"]
    assert (answer["code"], back["is_proven"]) == (0, True), answer
    assert back["text"].startswith("by a follow-up job (requeue is forbidden)")


def test_a_submission_the_doctor_and_why_name_the_reservation_that_holds_a_job_back(site: Site) -> None:
    maintenance = [
        "reservation=maint",
        "starttime=now+9minutes",
        "duration=60",
        "nodes=ALL",
        "flags=maint",
        "user=root",
    ]
    site.box.run(["scontrol", "create", *maintenance])
    try:
        env = {"TOOLKIT_RUNS": str(site.runs)}
        told = [
            site.box.run(["toolkit", "exec", "--name", "held", "cluster.nodes=2", "--", "true"], env=env).stderr,
            site.box.run(["toolkit", "doctor", "--site", "cluster.nodes=2"], env=env).stdout,
        ]
        # Slurm gives a reason once it has looked at the queue.
        told += wait_for(
            lambda: re.findall(r".*reservation maint.*", site.box.run(["toolkit", "why", "held"], env=env).stdout),
            90,
            "why names the reservation",
        )
        site.box.run(["toolkit", "cancel", "held"], env=env)
    finally:
        site.box.run(["scontrol", "delete", "reservation=maint"])
    for text in told:
        assert re.search(r"the reservation maint begins in [89] min .* cluster.time_min=[67] it can start before", text)
