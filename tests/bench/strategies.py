"""Memory and time of a step under ddp, fsdp, zero and tensor, side by side.

    python -m tests.bench.strategies [RANKS]

trains a Llama of 3.7 million parameters (8 blocks, 192 wide, windows of 64 bytes, 2 of them for each rank) with AdamW.
On four ranks there are grids of two by two as well.
The strategies take turns step by step, so that other load of the machine falls on all alike.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jobs.language_model import next_token
from jobs.llama import Llama, LlamaSizes
from tests.bench import record
from tests.dist.ranks import run_ranks
from toolkit.config import MeshConfig, StrategyConfig
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies import Objective, Strategy, build_strategy

NEXT_TOKEN = Objective(lambda model, batch: next_token(model(batch.inputs), batch.targets))
SIZES, LENGTH, PER_RANK, TURNS = LlamaSizes(256, layers=8, width=192, heads=4, kv_heads=4, hidden=512), 64, 2, 7
KINDS = {
    "ddp": StrategyConfig("ddp"),
    "zero": StrategyConfig("zero"),
    "fsdp": StrategyConfig("fsdp"),
    "fsdp, recomputing": StrategyConfig("fsdp", activation_checkpointing=True),
    "tensor": StrategyConfig("tensor"),
    "tensor, sequences": StrategyConfig("tensor", sequence_parallel=True),
}
GRIDS = {
    "fsdp, 2 replicas": StrategyConfig("fsdp", mesh=MeshConfig(replicas=2)),
    "tensor, 2 replicas": StrategyConfig("tensor", mesh=MeshConfig(replicas=2)),
    "tensor, 2 shards": StrategyConfig("tensor", mesh=MeshConfig(shards=2)),
}


def kinds(ranks: int) -> dict[str, StrategyConfig]:
    return KINDS | (GRIDS if ranks == 4 else {})


def batch(session: Session, share: Share) -> Batch:
    draw = torch.Generator().manual_seed(share.index)
    mine = PER_RANK * session.world_size // share.count
    text = torch.randint(256, (mine, LENGTH + 1), generator=draw)
    return Batch((text[:, :-1], text[:, 1:]), torch.arange(mine), PER_RANK * session.world_size)


def built(session: Session, kind: str) -> Strategy:
    torch.manual_seed(0)
    strategy = build_strategy(kinds(session.world_size)[kind], session)
    sample = batch(session, strategy.share)
    strategy.build(lambda: Llama(SIZES), lambda model: torch.optim.AdamW(model.parameters()), NEXT_TOKEN, sample)
    strategy.step(sample, 1e-3)
    return strategy


def memory(session: Session, kind: str) -> tuple[float, float]:
    """Return MiB of weights and moments between steps, and those that a step adds.

    A step adds the rise of the process's resident memory above its size before.
    """
    strategy = built(session, kind)
    kept = sum(value.numel() * value.element_size() for value in strategy.live_state().values())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    strategy.step(batch(session, strategy.share), 1e-3)
    return kept / 2**20, (_status("VmHWM") - before) / 2**10


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def times(session: Session, chosen: Sequence[str]) -> dict[str, list[float]]:
    """Return the steps of each, in seconds."""
    strategies = {kind: built(session, kind) for kind in chosen}
    found: dict[str, list[float]] = {kind: [] for kind in strategies}
    for _ in range(TURNS):
        for kind, strategy in strategies.items():
            began = time.perf_counter()
            strategy.step(batch(session, strategy.share), 1e-3)
            found[kind].append(time.perf_counter() - began)
    return found


def main() -> None:
    """Print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    parser.add_argument(
        "--kinds", nargs="+", choices=[*KINDS, *GRIDS], help="beside ddp; default: all of so many ranks"
    )
    record.add_option(parser)
    args = parser.parse_args()
    ranks: int = args.ranks
    chosen = ["ddp", *args.kinds] if args.kinds else [*kinds(ranks)]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back to the system, so that peaks are real
    took: dict[str, list[float]] = run_ranks(ranks, times, chosen, limit_s=900)[0]
    rows, of_kinds = list[dict[str, Any]](), dict[str, tuple[list[float], list[float]]]()
    for kind in chosen:
        kept, added = run_ranks(ranks, memory, kind, limit_s=300)[0]
        of_kinds[kind] = [kept], [added]
        ratio = statistics.median(took[kind]) / statistics.median(took["ddp"])
        print(f"{kind:18} keeps {kept:6.1f} MiB  a step adds {added:6.1f} MiB  takes {ratio:.2f} of ddp's time")
        for what, mib, plain in zip(
            ("a rank keeps", "a step adds at its peak"), of_kinds[kind], of_kinds["ddp"], strict=True
        ):
            rows.append(record.row(f"{kind}: {what}", mib, "MiB", to=plain, peer="ddp's"))
        rows.append(record.row(f"{kind}: a step", took[kind], to=took["ddp"], peer="ddp's"))
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
