"""Ranks of neighbouring numbers are on nodes of one switch or block, as Slurm's topology plugin tells it."""

import pytest

from tests.slurm.conftest import BoxFactory, visit
from tests.slurm.site import END_S, attempts_of

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

SWITCHES = "SwitchName=leaf1 Nodes=node[1,3]\nSwitchName=leaf2 Nodes=node[2,4]\nSwitchName=top Switches=leaf[1-2]\n"
BLOCKS = "BlockName=rack1 Nodes=node[1,3]\nBlockName=rack2 Nodes=node[2,4]\nBlockSizes=2\n"
#: Ranks on node2 are killed by nobody knows what, until the node is replaced.
RANK = 'echo "at $SLURM_PROCID $SLURMD_NODENAME"; test $SLURMD_NODENAME != node2 || kill -KILL $$'


@pytest.mark.parametrize(
    ("slurm", "topology", "segments"),
    [("22.05", SWITCHES, "leave cluster.segment out"), ("24.11", BLOCKS, "cluster.segment must divide")],
    ids=["switches", "blocks"],
)
def test_nodes_of_one_switch_or_block_have_neighbouring_ranks(
    make_box: BoxFactory, request: pytest.FixtureRequest, slurm: str, topology: str, segments: str
) -> None:
    for site in visit(make_box(slurm=slurm, profile="plain", topology=topology), request):
        size = ["cluster.nodes=3", "cluster.spare_nodes=1", "cluster.preflight=false"]
        command, runs = ["toolkit", "exec", *size, "--name", "near", "--follow"], {"TOOLKIT_RUNS": str(site.runs)}
        refused = site.box.run([*command, "cluster.segment=3", "--", "true"], env=runs, check=False)
        assert refused.returncode == 2
        assert segments in refused.stderr
        own = ["cluster.segment=2"] if topology == BLOCKS else []
        site.run(*command, *own, "--", "sh", "-c", RANK, timeout=END_S)
        run = site.find("near")
        first, second, third = attempts_of(run, 3)
        assert list(first.nodes) == list(second.nodes) == ["node1", "node3", "node2"]
        assert list(third.nodes) == ["node1", "node3", "node4"]
        ranks = [run.rank_log(3, rank).read_text().split()[1:] for rank in range(3)]
        assert ranks == [["0", "node1"], ["1", "node3"], ["2", "node4"]]
