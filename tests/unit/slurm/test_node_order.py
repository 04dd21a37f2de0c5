"""The order of a job's nodes, by what `scontrol show topology` prints."""

from pathlib import Path

import pytest

from toolkit.config import JobConfig, dump_config
from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation, in_order, node_order, units_of
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job.nodes import Nodes
from toolkit.run.supervise import entry

#: The example of Slurm's topology.conf(5), as scontrol prints it.
TREE = """\
SwitchName=s0 Level=0 LinkSpeed=900 Nodes=tux[0-3]
SwitchName=s1 Level=0 LinkSpeed=900 Nodes=tux[4-7]
SwitchName=s2 Level=0 LinkSpeed=900 Nodes=tux[8-11]
SwitchName=s3 Level=1 LinkSpeed=1800 Nodes=tux[0-11] Switches=s[0-2]
SwitchName=s4 Level=1 LinkSpeed=1800 Nodes=tux[0-11] Switches=s[0-2]
"""
#: Nodes of four GPUs each, 18 in an NVLink domain of 72 GPUs, and two domains in a larger block.
BLOCKS = """\
BlockName=rack1 BlockIndex=0 Nodes=gb[01-18] BlockSize=18
BlockName=rack2 BlockIndex=1 Nodes=gb[19-36] BlockSize=18
BlockName=rack3 BlockIndex=2 Nodes=gb[37-54] BlockSize=18
AggregatedBlock=rack[1-2] BlockIndex=3 Nodes=gb[01-36] BlockSize=36
"""
#: Leaf switches whose nodes are not numbered in turn. Two of them are below one switch.
INTERLEAVED = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1,3,5,7]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[2,4,6,8]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[9-10]
SwitchName=near Level=1 LinkSpeed=1 Nodes=n[1,3,5,7,9-10] Switches=leaf1,leaf3
SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-10] Switches=near,leaf2
"""


@pytest.mark.parametrize(
    ("text", "hosts", "expected"),
    [
        pytest.param(INTERLEAVED, "n1 n2 n3 n4 n9 n10", "n1 n3 n9 n10 n2 n4", id="switches below one switch"),
        pytest.param(INTERLEAVED, "n2 n1 n4 n3", "n2 n4 n1 n3", id="the batch host stays the first"),
        pytest.param(INTERLEAVED, "n1 n3 n5", "n1 n3 n5", id="one switch"),
        pytest.param(INTERLEAVED, "x1 n2 n1 x2 n4", "x1 n2 n4 n1 x2", id="nodes of no switch"),
        pytest.param(TREE, "tux0 tux5 tux1 tux9 tux4", "tux0 tux1 tux5 tux4 tux9", id="two core switches"),
        pytest.param(BLOCKS, "gb01 gb40 gb20 gb02 gb41", "gb01 gb02 gb20 gb40 gb41", id="blocks"),
        pytest.param("", "b a", "b a", id="nothing"),
        pytest.param("No topology information available\n", "b a", "b a", id="no plugin"),
    ],
)
def test_near_nodes_follow_each_other_and_the_rest_is_slurms_order(text: str, hosts: str, expected: str) -> None:
    assert in_order(hosts.split(), units_of(text)) == expected.split()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.switch.node")
    slurm = FakeSlurm()
    slurm.switches = INTERLEAVED
    return slurm


def nodes(tmp_path: Path, slurm: FakeSlurm, *hosts: str, spare: int) -> Nodes:
    allocation = Allocation(hosts, (2,) * len(hosts), 1, job_id="7").in_order(slurm)
    return Nodes(rundir.create("test", tmp_path), allocation, spare=spare, allow_fewer=False)


def placed(of: Nodes) -> tuple[str, ...]:
    plan = of.plan()
    of.note_used(plan)
    return plan.hosts


def test_ranks_keep_their_nodes_and_spares_of_the_same_switch_are_taken_first(tmp_path: Path, slurm: FakeSlurm) -> None:
    of = nodes(tmp_path, slurm, "n2", "n1", "n4", "n3", "n6", "n5", spare=3)
    assert placed(of) == placed(of) == ("n2", "n4", "n6")
    of = nodes(tmp_path, slurm, "n1", "n2", "n3", "n4", "n9", "n10", spare=2)
    assert placed(of) == ("n1", "n3", "n9", "n10")
    of = nodes(tmp_path, slurm, "n1", "n2", "n3", "n4", "n9", "n10", spare=3)
    assert placed(of) == ("n1", "n3", "n9")
    of.condemn("n3", "no answer")  # n10 has a switch with its leaf switch in common
    assert placed(of) == ("n1", "n10", "n9")
    of.condemn("n9", "no answer")
    assert placed(of) == ("n1", "n10", "n2")
    of.condemn("n2", "no answer")
    assert placed(of) == ("n1", "n10", "n4")


@pytest.mark.parametrize("pattern", ["", "node"])
def test_without_a_topology_plugin_slurm_is_not_asked(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)
    slurm.is_up = False  # a question would raise
    assert node_order(["n2", "n1"], slurm) == ["n2", "n1"]


def test_a_single_node_is_not_asked_about_and_without_an_answer_slurms_order_stays(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.is_up = False
    assert node_order(["n1"], slurm) == ["n1"]
    assert placed(nodes(tmp_path, slurm, "n1", "n2", "n3", spare=0)) == ("n1", "n2", "n3")


def test_a_topology_that_is_cut_off_leaves_slurms_order(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_TOPO_LEN cuts the output of scontrol."""
    monkeypatch.setattr(slurm, "topology", lambda: "SwitchName=leaf Level=0 Nodes=n[1-2")
    assert node_order(["n2", "n1"], slurm) == ["n2", "n1"]


def test_nodes_of_each_component_are_in_order(slurm: FakeSlurm) -> None:
    hosts, components = ("n2", "n1", "n4", "n6", "n3", "n5"), (0, 0, 0, 1, 1, 1)
    whole = Allocation(hosts, (2, 2, 2, 4, 4, 4), 1, components=components, job_id="7").in_order(slurm)
    assert whole.hosts == ("n2", "n4", "n1", "n6", "n3", "n5")
    assert whole.by_component == [["n2", "n4", "n1"], ["n6", "n3", "n5"]]
    assert whole.tasks == (2, 2, 2, 4, 4, 4)


def test_placement_checks_and_copies_know_the_same_spares(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the checks and the copies took the last nodes in Slurm's order for the spares."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "1(x4)"}
    for name, value in {**variables, "SLURM_NTASKS": "4", "SLURM_CLUSTER_NAME": "here"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(entry, "Slurm", lambda: slurm)
    run = rundir.create("test")
    config = JobConfig()
    config.cluster.spare_nodes = 1
    run.config.write_text(dump_config(config))
    context = entry.build(run, "slurm", None)._context
    assert context.nodes.plan().hosts == context.allocation.without_spares(1).hosts == ("n1", "n3", "n2")
