"""The contract of a torch process group, as cases that all ranks run together.

test_backend_contract.py runs them. A case gets a `Team`, calls the real ``torch.distributed``, and compares with
torch's own result on all ranks' inputs in one process. Run as a program this is one rank of an MPI launch, with all
cases in one process, since a start costs more than all cases together:

    mpirun -n 4 python -m tests.dist.contract FOLDER
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

WORLD = 4
LARGE = 1 << 18  # elements: more than any transport sends before the other side asks for them
LIMIT_S = 30.0


@dataclass(frozen=True)
class Team:
    """The members of one group, all of which take part in the case. ``rank`` counts within the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def every(self, make: Callable[[int], Tensor]) -> list[Tensor]:
        """``make(rank)`` of all ranks."""
        return [make(rank) for rank in range(self.size)]

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size


Case = Callable[[Team], None]
AnyCase = TypeVar("AnyCase", bound=Callable[..., None])
CASES: dict[str, Case] = {}


def case(function: AnyCase) -> AnyCase:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def numbers(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(3, 4) ones and twos, whose sums and products every dtype holds exactly."""
    return (((torch.arange(12) + 1) * (rank + 3)) % 7 % 2 + 1).view(3, 4).to(dtype)


def total(tensors: Iterable[Tensor]) -> Tensor:
    added = sum(tensors)
    assert isinstance(added, Tensor)
    return added


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def all_reduce(name: str, dtype: torch.dtype, team: Team) -> None:
    op = getattr(dist.ReduceOp, name)
    expected = reduce(OPS[name], team.every(partial(numbers, dtype=dtype)))
    for is_async in (False, True):
        tensor = numbers(team.rank, dtype)
        work = dist.all_reduce(tensor, op, team.group, async_op=is_async)
        if is_async:
            work.wait()
        same(tensor, expected)


for _dtype in FLOATS + INTEGERS:
    for _name in OPS if _dtype in INTEGERS else list(OPS)[:4]:
        CASES[f"all reduce {_name} {_dtype}".replace("torch.", "")] = partial(all_reduce, _name, _dtype)


@case
def all_reduce_AVG(team: Team) -> None:
    for dtype in FLOATS:
        tensor = numbers(team.rank, dtype) * team.size
        dist.all_reduce(tensor, dist.ReduceOp.AVG, team.group)
        same(tensor, total(team.every(numbers)).to(dtype))


@case
def all_reduce_bool(team: Team) -> None:
    mine = torch.arange(4) == team.rank
    dist.all_reduce(mine, dist.ReduceOp.MAX, team.group)
    same(mine, torch.arange(4) < team.size)


@case
def all_reduce_complex(team: Team) -> None:
    tensor = torch.complex(numbers(team.rank), -numbers(team.rank))
    dist.all_reduce(tensor, group=team.group)
    expected = total(team.every(numbers))
    same(tensor, torch.complex(expected, -expected))


@case
def bf16_is_summed_in_fp32(team: Team) -> None:
    """256 + 1 is 256 in bf16, and 256 + 1 + 1 + ... then is too."""
    tensor = torch.tensor([256.0 if team.rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor, group=team.group)
    same(tensor, torch.tensor([256.0 + team.size - 1]).bfloat16())


@case
def all_reduce_of_20_MB(team: Team) -> None:
    """A few bytes are added: a backend that sends pieces has a short last one."""
    tensor = (torch.arange((5 << 20) + 3) % 1000).float()
    dist.all_reduce(tensor, group=team.group)
    same(tensor, (torch.arange((5 << 20) + 3) % 1000).float() * team.size)


@case
def all_ranks_get_the_same_bits(team: Team) -> None:
    tensor = torch.randn(10_007, generator=torch.Generator().manual_seed(team.rank))
    dist.all_reduce(tensor, group=team.group)
    others = [torch.empty_like(tensor) for _ in range(team.size)]
    dist.all_gather(others, tensor, group=team.group)
    for other in others:
        same(other, tensor)


@case
def reduce_to_each(team: Team) -> None:
    for root in range(team.size):
        tensor = numbers(team.rank)
        dist.reduce(tensor, group=team.group, group_dst=root)
        if team.rank == root:
            same(tensor, total(team.every(numbers)))


@case
def reduce_scatter(team: Team) -> None:
    parts = [numbers(team.rank + part) for part in range(team.size)]
    output = torch.empty(3, 4)
    dist.reduce_scatter(output, parts, group=team.group)
    same(output, total(numbers(rank + team.rank) for rank in range(team.size)))


@case
def reduce_scatter_single(team: Team) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = torch.empty(3, 4, dtype=dtype)
        parts = torch.cat([numbers(team.rank + part, dtype) for part in range(team.size)])
        work = dist.reduce_scatter_tensor(output, parts, group=team.group, async_op=dtype is torch.bfloat16)
        if work is not None:
            work.wait()
        same(output, total(numbers(rank + team.rank) for rank in range(team.size)).to(dtype))


@case
def reduce_scatter_AVG(team: Team) -> None:
    output, parts = torch.empty(1), torch.full((team.size,), float(team.rank * 2))
    dist.reduce_scatter_tensor(output, parts, dist.ReduceOp.AVG, team.group)
    same(output, torch.tensor([team.size - 1.0]))


@case
def broadcast_from_each(team: Team, *dtypes: torch.dtype) -> None:
    for root in range(team.size):
        for dtype in dtypes or (*FLOATS, torch.uint8, torch.int64, torch.bool):
            tensor = numbers(team.rank, dtype)
            dist.broadcast(tensor, group=team.group, group_src=root)
            same(tensor, numbers(root, dtype))


@case
def broadcast_of_rare_dtypes(team: Team) -> None:
    broadcast_from_each(team, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn)


@case
def scalars_and_nothing(team: Team) -> None:
    one, none = torch.tensor(1.0), torch.empty(0)
    dist.all_reduce(one, group=team.group)
    dist.all_reduce(none, group=team.group)
    same(one, torch.tensor(float(team.size)))
    dist.broadcast(one, group=team.group, group_src=0)


@case
def not_contiguous(team: Team) -> None:
    tensor = numbers(team.rank).t()
    dist.all_reduce(tensor, group=team.group)
    same(tensor, total(team.every(numbers)).t())
    columns = torch.zeros(3, 8)
    columns[:, ::2] = numbers(team.rank)
    dist.broadcast(columns[:, ::2], group=team.group, group_src=1)
    same(columns[:, ::2], numbers(1))
    same(columns[:, 1::2], torch.zeros(3, 4))


@case
def not_contiguous_parts(team: Team) -> None:
    wide = torch.zeros(4, 3 * team.size)
    parts = [part.t() for part in wide.split(3, dim=1)]
    dist.all_gather(parts, numbers(team.rank).t().contiguous().t(), group=team.group)
    same(wide, torch.cat([tensor.t() for tensor in team.every(numbers)], dim=1))


@case
def all_gather(team: Team) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensors = [torch.empty(3, 4, dtype=dtype) for _ in range(team.size)]
        dist.all_gather(tensors, numbers(team.rank, dtype), group=team.group)
        for rank, tensor in enumerate(tensors):
            same(tensor, numbers(rank, dtype))


@case
def all_gather_uneven(team: Team) -> None:
    tensors = [torch.empty(rank + 1) for rank in range(team.size)]
    dist.all_gather(tensors, torch.full((team.rank + 1,), float(team.rank)), group=team.group)
    for rank, tensor in enumerate(tensors):
        same(tensor, torch.full((rank + 1,), float(rank)))


@case
def all_gather_single(team: Team) -> None:
    whole = torch.empty(3 * team.size, 4)
    dist.all_gather_into_tensor(whole, numbers(team.rank), group=team.group)
    same(whole, torch.cat(team.every(numbers)))


@case
def all_gather_single_in_place(team: Team) -> None:
    """As FSDP2 does: the input is the rank's own part of the output."""
    whole = torch.zeros(3 * team.size, 4)
    own = whole[3 * team.rank : 3 * team.rank + 3].copy_(numbers(team.rank))
    dist.all_gather_into_tensor(whole, own, group=team.group, async_op=True).wait()
    same(whole, torch.cat(team.every(numbers)))


@case
def gather_to_each(team: Team) -> None:
    for root in range(team.size):
        tensors = [torch.empty(3, 4) for _ in range(team.size)] if team.rank == root else None
        dist.gather(numbers(team.rank), tensors, group=team.group, group_dst=root)
        for rank, tensor in enumerate(tensors or ()):
            same(tensor, numbers(rank))


@case
def scatter_from_each(team: Team) -> None:
    for root in range(team.size):
        parts = [numbers(root + rank) for rank in range(team.size)] if team.rank == root else None
        tensor = torch.empty(3, 4)
        dist.scatter(tensor, parts, group=team.group, group_src=root)
        same(tensor, numbers(root + team.rank))


@case
def all_to_all(team: Team) -> None:
    received = [torch.empty(1) for _ in range(team.size)]
    sent = [torch.tensor([10.0 * team.rank + to]) for to in range(team.size)]
    dist.all_to_all(received, sent, group=team.group)
    same(torch.cat(received), torch.arange(team.size) * 10.0 + team.rank)


@case
def all_to_all_uneven(team: Team) -> None:
    """Rank r sends r + 1 numbers to everybody."""
    received = [torch.empty(rank + 1) for rank in range(team.size)]
    sent = [torch.full((team.rank + 1,), 10.0 * team.rank + to) for to in range(team.size)]
    dist.all_to_all(received, sent, group=team.group)
    for rank, tensor in enumerate(received):
        same(tensor, torch.full((rank + 1,), 10.0 * rank + team.rank))


@case
def all_to_all_single(team: Team) -> None:
    received, sent = torch.empty(team.size, 2), torch.arange(team.size * 2.0).view(-1, 2) + 100 * team.rank
    dist.all_to_all_single(received, sent, group=team.group)
    parts = [torch.arange(2.0) + 2 * team.rank + 100 * rank for rank in range(team.size)]
    same(received, torch.stack(parts))


@case
def all_to_all_single_uneven(team: Team) -> None:
    """Rank r gets r rows of each."""
    rows = list(range(team.size))
    sent = torch.full((sum(rows), 2), float(team.rank))
    received = torch.empty(team.rank * team.size, 2)
    dist.all_to_all_single(received, sent, [team.rank] * team.size, rows, group=team.group)
    same(received, torch.arange(float(team.size)).repeat_interleave(team.rank)[:, None].expand(-1, 2).contiguous())


@case
def objects(team: Team) -> None:
    mine: dict[str, Any] = {"rank": team.rank, "text": "x" * team.rank}
    got: list[Any] = [None] * team.size
    dist.all_gather_object(got, mine, group=team.group)
    assert [one["rank"] for one in got] == list(range(team.size))
    told: list[Any] = [mine if team.rank == 1 else None]
    dist.broadcast_object_list(told, group=team.group, group_src=1)
    assert told == [{"rank": 1, "text": "x"}]


@case
def functional_collectives(team: Team) -> None:
    """What compiled code and DTensor call: torch finds the group by its name."""
    reduced = functional.all_reduce(numbers(team.rank), "sum", team.group)
    same(reduced + 0, total(team.every(numbers)))
    parts = _scattered(torch.ones(team.size * 2), "sum", 0, team.group)
    same(parts + 0, torch.full((2,), float(team.size)))


#: torch 2.15 renamed it.
_scattered = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@case
def several_on_their_way(team: Team) -> None:
    tensors = [torch.full((size,), float(team.rank)) for size in (1, LARGE, 5)]
    works = [dist.all_reduce(tensor, group=team.group, async_op=True) for tensor in tensors]
    dist.barrier(team.group)
    for work, tensor in zip(reversed(works), reversed(tensors), strict=True):
        work.wait()
        same(tensor, torch.full_like(tensor, sum(range(team.size))))


@case
def futures_are_set_unasked_and_chain(team: Team) -> None:
    tensor = torch.full((LARGE,), float(team.rank))
    future = dist.all_reduce(tensor, group=team.group, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    again = halved.then(lambda done: done.value() + 1)
    same(again.wait(), torch.full((LARGE,), sum(range(team.size)) / 2 + 1))


@case
def a_callback_begins_the_next(team: Team) -> None:
    def then(done: torch.futures.Future[Any]) -> Any:
        return dist.all_reduce(done.value()[0], group=team.group, async_op=True).get_future()

    first = dist.all_reduce(torch.ones(3), group=team.group, async_op=True).get_future()
    same(first.then(then).wait().wait()[0], torch.full((3,), float(team.size**2)))


@case
def work_ends_without_being_waited_for(team: Team) -> None:
    tensor = torch.ones(LARGE)
    work = dist.all_reduce(tensor, group=team.group, async_op=True)
    deadline = time.monotonic() + LIMIT_S
    while not work.is_completed():
        assert time.monotonic() < deadline
    work.wait()
    same(tensor, torch.full((LARGE,), float(team.size)))


@case
def barriers(team: Team) -> None:
    dist.barrier(team.group)
    dist.barrier(team.group, async_op=True).wait()


@case
def coalesced(team: Team, other: torch.dtype = torch.float32) -> None:
    for is_async in (False, True):
        tensors = [numbers(team.rank), numbers(team.rank, other)[0]]
        with dist._coalescing_manager(team.group, async_ops=is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=team.group)
        if is_async:
            manager.wait()
        same(tensors[0], total(team.every(numbers)))
        same(tensors[1], total(team.every(numbers)).to(other)[0])


@case
def coalesced_of_two_dtypes(team: Team) -> None:
    coalesced(team, torch.float64)


@case
def coalesced_single(team: Team) -> None:
    wholes = [torch.empty(team.size), torch.empty(2 * team.size)]
    with dist._coalescing_manager(team.group, async_ops=True) as manager:
        dist.all_gather_into_tensor(wholes[0], torch.full((1,), float(team.rank)), group=team.group)
        dist.all_gather_into_tensor(wholes[1], torch.full((2,), float(team.rank)), group=team.group)
    manager.wait()
    same(wholes[1], torch.arange(float(team.size)).repeat_interleave(2))
    outputs = [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager(team.group):
        for output, whole in zip(outputs, wholes, strict=True):
            dist.reduce_scatter_tensor(output, whole, group=team.group)
    same(outputs[1], torch.full((2,), float(team.rank * team.size)))


@case
def coalesced_by_device(team: Team) -> None:
    tensors = [numbers(team.rank), numbers(team.rank) + 1]
    with dist._coalescing_manager(team.group, torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=team.group)
    manager.wait()
    same(tensors[1], total(team.every(numbers)) + team.size)


@case
def both_ways_at_once(team: Team) -> None:
    """Both neighbours send before they receive, as pipelines do. Neither may wait for the other side."""
    sent, received = torch.full((LARGE,), float(team.rank)), torch.empty(LARGE)
    works = [
        dist.isend(sent, group=team.group, group_dst=team.right),
        dist.irecv(received, group=team.group, group_src=team.left),
    ]
    for work in works:
        work.wait()
    same(received, torch.full((LARGE,), float(team.left)))


@case
def blocking_ring(team: Team) -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    if team.rank != 0:
        dist.recv(tensor, group=team.group, group_src=team.left)
    dist.send(tensor + 1, group=team.group, group_dst=team.right)
    if team.rank == 0:
        dist.recv(tensor, group=team.group, group_src=team.left)
    same(tensor, torch.full((3,), float(team.rank or team.size), dtype=torch.bfloat16))


@case
def tags_find_each_other(team: Team) -> None:
    sent = [dist.isend(torch.full((2,), float(tag)), group=team.group, group_dst=team.right, tag=tag) for tag in (1, 2)]
    tensors = [torch.empty(2), torch.empty(2)]
    for tag in (2, 1):
        dist.recv(tensors[tag - 1], group=team.group, group_src=team.left, tag=tag)
    for work in sent:
        work.wait()
    same(torch.stack(tensors), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


@case
def from_anybody(team: Team) -> None:
    if team.rank != 0:
        dist.send(torch.tensor([float(team.rank)]), group=team.group, group_dst=0)
        return
    tensor, seen = torch.empty(1), set()
    for _ in range(team.size - 1):
        sender = dist.recv(tensor, group=team.group)
        assert dist.get_group_rank(team.group, sender) == int(tensor)
        seen.add(int(tensor))
    assert seen == set(range(1, team.size))


@case
def a_sent_tensor_may_be_forgotten(team: Team) -> None:
    """Nobody holds or waits for the work: the message arrives all the same."""
    dist.isend(torch.full((LARGE,), 7.0), group=team.group, group_dst=team.right)
    received = torch.empty(LARGE)
    dist.recv(received, group=team.group, group_src=team.left)
    same(received, torch.full((LARGE,), 7.0))


@case
def not_contiguous_messages(team: Team) -> None:
    columns = torch.zeros(4, 6)
    work = dist.isend(numbers(team.rank).t(), group=team.group, group_dst=team.right)
    dist.recv(columns[:, ::2], group=team.group, group_src=team.left)
    work.wait()
    same(columns[:, ::2], numbers(team.left).t())


@case
def batches_of_messages(team: Team) -> None:
    received = torch.empty(3, 4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, group=team.group, group_peer=team.left),
            dist.P2POp(dist.isend, numbers(team.rank), group=team.group, group_peer=team.right),
        ]
    )
    for work in works:
        work.wait()
    same(received, numbers(team.left))


def raises(what: str, call: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=what):
        call()


@case
def errors_name_the_rank(team: Team) -> None:
    rank = f"rank {dist.get_rank()}"
    raises(rank, lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, team.group))
    raises(rank, lambda: dist.all_gather([torch.empty(2)], torch.ones(2), group=team.group))
    raises(rank, lambda: dist.all_reduce(torch.ones(2).to_sparse(), group=team.group))


@case
def a_wait_has_an_end(team: Team) -> None:
    tensor = torch.empty(1)
    work = dist.irecv(tensor, group=team.group, group_src=team.left)
    raises(f"rank {dist.get_rank()}", lambda: work.wait(timedelta(seconds=0.05)))
    dist.barrier(team.group)
    dist.send(torch.ones(1), group=team.group, group_dst=team.right)
    work.wait()
    same(tensor, torch.ones(1))


def run_cases(names: list[str]) -> dict[str, str]:
    """Return the outcome of each case by ``<ranks> <name>``: "" or a traceback. Cases run on all ranks, and on all but
    the first, so that a rank's number in the group is not its number in the world."""
    from tests.dist import parallel_cases

    everybody, last = dist.group.WORLD, cast(dist.ProcessGroup, dist.new_group(range(1, WORLD)))
    assert everybody is not None
    rank = dist.get_rank()
    cases = {name: CASES[name] for name in names if name in CASES}
    outcomes = {f"{WORLD} {name}": _outcome(one, Team(everybody, rank, WORLD)) for name, one in cases.items()}
    if rank > 0:
        team = Team(last, rank - 1, WORLD - 1)
        outcomes |= {f"{WORLD - 1} {name}": _outcome(one, team) for name, one in cases.items()}
    whole = {name: parallel_cases.CASES[name] for name in names if name not in CASES}
    outcomes |= {f"{WORLD} {name}": _outcome(one, None) for name, one in whole.items()}
    return outcomes


def _outcome(call: Callable[[Any], None], team: Team | None) -> str:
    try:
        call(team)
        told = ""
    except Exception:
        told = traceback.format_exc()
    dist.barrier(team.group if team else None)  # a rank that is ahead must not send what this case would receive
    return told


def main(folder: Path) -> None:
    """One rank of an MPI launch; writes its outcomes to ``rank-N.json``."""
    from toolkit.plugins.mpi import backend as mpi

    torch.set_num_threads(1)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group(mpi.register(), store=store, rank=rank, world_size=WORLD)
    outcomes = run_cases(json.loads((folder / "cases.json").read_text()))
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
    mpi.finalize(None, None, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
