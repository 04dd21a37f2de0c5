"""One contract for process groups, which gloo and our group over MPI pass.

Its cases run on 4 ranks, and on 3 of them.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.dist import contract, parallel_cases
from tests.dist.mpi import mpirun
from tests.dist.ranks import run_ranks
from toolkit.ranks.session import Session

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: What a backend cannot do: refuses, gets wrong (tensors that are not contiguous), or waits for for ever.
LACKS: dict[str, set[str]] = {
    "gloo": {
        *(name for name in contract.CASES if name.endswith(" int16")),
        "broadcast of rare dtypes",
        "not contiguous",
        "not contiguous messages",
        "all gather uneven",
        "all to all uneven",
        *(["all to all"] if TORCH < (2, 13) else []),
        "coalesced of two dtypes",
        "coalesced by device",
        "a sent tensor may be forgotten",
        "a wait has an end",
        "errors name the rank",
    },
    "mpi": set(),
}
if TORCH < (2, 9):  # what docs/site.md says of older ones
    LACKS["gloo"] |= {"FSDP2", "reduce scatter AVG"}  # it sums
if TORCH < (2, 8):
    LACKS["gloo"] |= {"pipeline 1F1B", "all reduce AVG", "reduce scatter"}
if TORCH < (2, 7):
    LACKS["mpi"] |= {"FSDP2", "pipeline 1F1B", "functional collectives"}


def names(backend: str) -> list[str]:
    return [name for name in (*contract.CASES, *parallel_cases.CASES) if name not in LACKS[backend]]


def on_gloo(session: Session) -> dict[str, str]:
    return contract.run_cases(names("gloo"))


def over_mpi() -> list[dict[str, str]]:
    pytest.importorskip("mpi4py")
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(names("mpi")))
        code, said = mpirun(contract.WORLD, ["-m", "tests.dist.contract", name])
        assert code == 0, said
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(contract.WORLD)]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_process_group_keeps_the_contract(backend: str) -> None:
    """One test for all cases, since starting the ranks costs more than they do."""
    results = run_ranks(contract.WORLD, on_gloo) if backend == "gloo" else over_mpi()
    told = [f"rank {rank}: {name}\n{said}" for rank, all in enumerate(results) for name, said in all.items() if said]
    assert not told, "\n".join(told)
    assert [len(all) for all in results] == [cases_of(backend, rank) for rank in range(contract.WORLD)]


def cases_of(backend: str, rank: int) -> int:
    """The first rank is not among the three."""
    parallel = len({*names(backend)} & {*parallel_cases.CASES})
    return (len(names(backend)) - parallel) * (2 if rank else 1) + parallel
