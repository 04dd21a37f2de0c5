"""What a copy of the state in memory costs a step, for two ranks.

They are on one node, and then on two as partners. `blocked` is the time that the training waits: for the end of the
copy before, for the sum at which the ranks meet, and for the copy. `background` is the time until digests and the
partner's copy are complete. A plain copy into memory that exists already is the lower bound of every way; both ranks
make one just before, at the same time. Both nodes are this machine, so the network is its loopback.

    python -m tests.bench.memory [--mib 64] [--step 0.5] [--copies 20]
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tests.bench import record
from tests.dist.ranks import run_ranks
from toolkit.nodes.agent import state_memory
from toolkit.nodes.agent.state_memory import NodeFiles
from toolkit.plugins.memory.copies import PeerMemory
from toolkit.ranks.collectives import sum_by_name
from toolkit.ranks.session import Session
from toolkit.ranks.state import Sharded, State

RANKS, TENSORS = 2, 16
#: They pay for new memory.
FIRST = 2


def measure(session: Session, files: Sequence[str], mib: int, step_s: float, copies: int) -> list[tuple[float, ...]]:
    """Return of each copy the ms of a plain one, blocked, and in the background."""
    size = RANKS // len(files)
    os.environ |= {"LOCAL_RANK": str(session.rank % size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ[state_memory.VARIABLE] = files[session.rank // size]
    count = mib * (1 << 18) // TENSORS
    live = [torch.rand(count) for _ in range(TENSORS)]
    state: State = {f"w{i}": Sharded(value, (RANKS * count,), (session.rank * count,)) for i, value in enumerate(live)}
    kept = [value.clone() for value in live]
    memory = PeerMemory.from_environment(session.rank, RANKS, 1, os.environ)
    memory.load(state, session.store, None)
    figures: list[tuple[float, ...]] = []
    for step in range(1, FIRST + copies + 1):
        time.sleep(step_s)
        # The ranks begin both at the same time: what one waits for another's step is no cost of the copy.
        dist.barrier()
        began = time.perf_counter()
        for value, place in zip(live, kept, strict=True):
            place.copy_(value)
        plain_s = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        memory.wait()
        sum_by_name({"figure": 1.0}, session.device)  # the ranks of a training meet here, too
        new_s = memory.write(step, state, {})
        figures.append((plain_s, time.perf_counter() - began - new_s, memory.background_s))
    memory.wait()
    memory.close()
    return [tuple(1000 * each for each in copy) for copy in figures[FIRST:]]


def main() -> None:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64, help="of each rank")
    parser.add_argument("--step", type=float, default=0.5, help="seconds that a step sleeps")
    parser.add_argument("--copies", type=int, default=20)
    record.add_option(parser)
    args = parser.parse_args()
    rows = []
    for nodes in (1, 2):
        agents = [NodeFiles() for _ in range(nodes)]
        files = [agent.hold(RANKS // nodes) for agent in agents]
        of_ranks = run_ranks(RANKS, measure, files, args.mib, args.step, args.copies)
        # Of each figure the slowest rank's counts, since the step waits for it.
        slowest = [[max(each) for each in zip(*of_copy, strict=True)] for of_copy in zip(*of_ranks, strict=True)]
        plain, blocked, background = map(list, zip(*slowest, strict=True))
        row = record.row(f"blocked on {nodes} nodes", blocked, "ms", to=plain, peer="a plain copy")
        rows.append(row)
        print(
            f"{args.mib} MiB a rank on {nodes} node{'s' * (nodes > 1)}: plain copy {statistics.median(plain):.1f} ms, "
            f"blocked {statistics.median(blocked):.1f} ms, {row['ratio']['median']:.2f} times a plain copy, background "
            f"{statistics.median(background):.0f} ms"
        )
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
