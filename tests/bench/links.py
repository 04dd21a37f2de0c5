"""A step of 25 million parameters over slow links: plain DDP and each compression.

Two ranks run in two network namespaces, joined by a pair of virtual interfaces. ``tc`` limits both ends to the rate of
the link, in each direction, as a cable does. Bytes are all that an interface has sent, with TCP's own. `cpu` is the
part of a step in which rank 0's processor worked, for passes, update and compression. On a busy machine the rest is not
all the link's. The loss is the one after ``--samples`` samples of real digits, from the same start. Needs root, and
``ip``, ``tc``, ``nsenter``, ``unshare`` and ``setpriv``. The namespaces and interfaces end with the bench, also when it
is killed.

    python -m tests.bench.links [--rates 1000 100] [--kinds ddp bf16 ...] [--steps 8] [--samples 1280]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.bench import record
from tests.box.namespaces import wait_for
from tests.dist.objectives import cross_entropy
from toolkit import registry
from toolkit.config import DataConfig, StrategyConfig
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import Loader, build_loader
from toolkit.ranks.agreement import Gate
from toolkit.ranks.agreement.torch_store import connector
from toolkit.ranks.batch import Share
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective

RANKS, DEVICE, ADDRESS = 2, "eth0", "10.66.0.{}"
TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")
BATCH, RATE = 32, 0.01
KINDS = {
    "ddp": StrategyConfig("ddp"),
    "bf16": StrategyConfig("ddp", compression="bf16"),
    "fp16": StrategyConfig("ddp", compression="fp16"),
    "int8": StrategyConfig("ddp", compression="int8"),
    "topk 1 %": StrategyConfig("ddp", compression="topk"),
    "powersgd 4": StrategyConfig("ddp", compression="powersgd"),
}
if "local_sgd" in registry.names("strategies"):
    KINDS["local_sgd"] = StrategyConfig("local_sgd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 100.0], help="of the link, in Mbit/s")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=8, help="that are timed; 8 are a round of local_sgd")
    parser.add_argument("--samples", type=int, default=1280, help="after which the loss is compared; 0: it is not")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    record.add_option(parser)
    given = parser.parse_args()
    # A rank is this same program, started again inside its network namespace.
    if given.rank is not None:
        be_rank(given)
        return
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid():
        print(
            f"left out: it needs root and {', '.join(TOOLS)}" + (f"; not found: {', '.join(missing)}" * bool(missing))
        )
        return
    with tempfile.TemporaryDirectory() as folder, two_networks() as pids:
        ranks = [start_rank(rank, pid, folder, sys.argv[1:]) for rank, pid in enumerate(pids)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")


@contextmanager
def two_networks() -> Iterator[list[int]]:
    """Yield the pids of two processes, each of which holds a network namespace.

    Both end with us.
    """
    with ExitStack() as stack:
        pids = [stack.enter_context(_network()) for _ in range(RANKS)]
        cable = ["ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(pids[1])]
        _inside(pids[0], cable)
        for number, pid in enumerate(pids, 1):
            _inside(pid, ["ip", "address", "add", f"{ADDRESS.format(number)}/24", "dev", DEVICE])
            for device in (DEVICE, "lo"):
                _inside(pid, ["ip", "link", "set", device, "up"])
        yield pids


@contextmanager
def _network() -> Iterator[int]:
    holder = subprocess.Popen(["setpriv", "--pdeathsig=KILL", "unshare", "--net", "sleep", "infinity"])
    try:
        ours = Path("/proc/self/ns/net").readlink()
        wait_for(lambda: Path(f"/proc/{holder.pid}/ns/net").readlink() != ours, 10, "a network namespace")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def _inside(pid: int, argv: list[str]) -> None:
    subprocess.run(["nsenter", f"--target={pid}", "--net", *argv], check=True)


def start_rank(rank: int, pid: int, folder: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    me = [sys.executable, "-m", "tests.bench.links", *arguments, "--rank", str(rank), "--folder", folder]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    died_with_us = ["setpriv", "--pdeathsig=KILL"]
    return subprocess.Popen([*died_with_us, "nsenter", f"--target={pid}", "--net", *me], env=environ)


def limit(mbit: float) -> None:
    """What this rank sends from now on; the other one does the same."""
    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket], check=True)


def sent_bytes() -> int:
    """By this rank's end of the cable, since it was made. (sysfs shows the devices of whoever mounted it.)"""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(counters[8])


def be_rank(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, kinds = given.rank, given.kinds
    store = dist.TCPStore(ADDRESS.format(1), 29400, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))
    gate = Gate(rank, RANKS, connector(store))
    session = Session(rank, RANKS, 0, torch.device("cpu"), given.folder, 1, store, Reporter(), gate)
    say = print if rank == 0 else lambda *_, **__: None
    loader, rows, peer = digits(session), list[dict[str, Any]](), given.kinds[0]
    with closing(loader):
        for mbit in given.rates:
            limit(mbit)
            say(f"\n{mbit:g} Mbit/s: an all-reduce of 8 MB took {bare() * 1e3:.0f} ms")
            say(f"{'':12}{'MB sent':>9}{'step':>11}{'cpu':>8}{'ddp/it':>8}", flush=True)
            found = {}
            for kind in kinds:
                found[kind] = time_steps(built(kind, session, loader), loader, given.steps)
                (megabytes, seconds, cpu), plain = found[kind], found[peer][1]
                say(f"{kind:12}{megabytes:9.2f}{seconds:9.2f} s{cpu:6.2f} s{plain / seconds:7.1f}x", flush=True)
            rows += in_rows(f"{mbit:g} Mbit/s, ", found, peer)
        # The loss does not depend on the link, so these steps may be quick.
        limit(10000)
        if given.samples:
            say(f"\nloss after {given.samples} samples, mean of the last 10 steps", flush=True)
        for kind in kinds if given.samples else ():
            loss = final_loss(built(kind, session, loader), loader, given.samples)
            say(f"{kind:12}{loss:9.4f}", flush=True)
            rows.append(record.row(f"loss after {given.samples} samples, {kind}", [loss], "", better="less"))
    if rank == 0:
        record.write(given.json, rows)
    dist.barrier()
    gate.close()
    dist.destroy_process_group()


def in_rows(title: str, found: Mapping[str, tuple[float, ...]], peer: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure of ``time_steps`` of each kind."""
    for what, unit, *of_kinds in zip(
        ("sent", "a step", "CPU of a step"), ("MB", "s", "s"), *found.values(), strict=True
    ):
        column = {kind: [value] for kind, value in zip(found, of_kinds, strict=True)}
        for kind, values in column.items():
            yield record.row(f"{title}{kind}: {what}", values, unit, to=column[peer], peer=peer)


def digits(session: Session) -> Loader:
    data = DataConfig("digits", global_batch_size=BATCH)
    return build_loader(build_datasets(data).train, data, Share(session.rank, RANKS), seed=0)


def model() -> nn.Module:
    """25 million parameters, nearly all in layers of 2048 x 2048."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 10))
    for layer in made.modules():
        if isinstance(layer, nn.Linear):  # torch's own would shrink what goes through seven layers to nothing
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return made


def built(kind: str, session: Session, loader: Loader) -> Strategy:
    strategy = build_strategy(KINDS[kind], session)
    strategy.build(
        model, lambda made: torch.optim.SGD(made.parameters(), RATE), criterion_objective(cross_entropy), loader.at(0)
    )
    return strategy


def bare() -> float:
    """The quicker of two plain all-reduces."""
    laps = []
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(torch.zeros(1 << 21))
        laps.append(time.perf_counter() - began)
    return min(laps)


def time_steps(strategy: Strategy, loader: Loader, steps: int) -> tuple[float, float, float]:
    """Return means over the steps: MB sent, seconds, and CPU seconds.

    They are means because a step of local_sgd may send all or nothing.
    """
    with closing(strategy):
        strategy.step(loader.at(0), RATE)
        dist.barrier()
        before, began, worked = sent_bytes(), time.perf_counter(), time.process_time()
        for step in range(steps):
            strategy.step(loader.at(step), RATE)
        dist.barrier()
        took, cpu = time.perf_counter() - began, time.process_time() - worked
        return (sent_bytes() - before) / steps / 1e6, took / steps, cpu / steps


def final_loss(strategy: Strategy, loader: Loader, samples: int) -> float:
    with closing(strategy):
        losses = torch.stack([strategy.step(loader.at(step), RATE).loss for step in range(samples // BATCH)])
        dist.all_reduce(losses)
        return statistics.fmean(losses[-10:].tolist())


if __name__ == "__main__":
    main()
