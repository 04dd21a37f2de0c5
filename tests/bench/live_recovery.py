"""From the SIGKILL of a rank to the next step, where other ranks live on.

Our jobs end the other ranks instead. This is a training of its own, without the toolkit: DDP over gloo, and a spare
process that has imported torch. A rank drawn at random is killed at a random moment. This process sees its end and
tells the others. They halt and go back to the newest step that all of them have had. torch's ``_reconfigure`` puts the
spare in the place of the dead rank, and the spare gets the state. A run is right if its weights and momentum end as
those of an undisturbed one, bit for bit.

In an all-reduce each rank waits for its neighbour in a ring. A rank whose neighbours live learns of the death by gloo's
time-out, which is 10 s here (``wait``), or because a thread of its own shuts gloo's sockets down (``cut``). Over slow
links it may wait for the time-out even then: gloo reports nothing to a rank that waits for a message on its way.

    python -m tests.bench.live_recovery [--ranks 4] [--runs 100] [--width 256] [--how cut|wait]
    unshare -n sh -c "ip link set lo up; tc qdisc add dev lo root tbf rate 2gbit burst 256kb latency 100ms;
        python -m tests.bench.live_recovery --width 1024"
"""

import argparse
import hashlib
import multiprocessing as mp
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bench import record

STEPS, TIMEOUT, PATIENCE = 60, timedelta(seconds=10), timedelta(seconds=60)


class Rank:
    """One process. ``steps`` is shared: how many steps one of the ranks has made."""

    def __init__(self, args: argparse.Namespace, spare: bool, port: int, pipe: Connection, steps: Any) -> None:
        self.args, self.spare, self.port, self.pipe, self.steps = args, spare, port, pipe, steps
        self.orders, self.lost = SimpleQueue[Any](), threading.Event()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        first, second, last = nn.Linear(64, args.width), nn.Linear(args.width, args.width), nn.Linear(args.width, 10)
        self.model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        self.model(torch.randn(32, 64)).sum().backward()  # the first pass of a process takes longer than others
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        momenta = [torch.zeros_like(weight) for weight in self.model.parameters()]
        for weight, momentum in zip(self.model.parameters(), momenta, strict=True):
            self.optimizer.state[weight]["momentum_buffer"] = momentum
        self.state = [*(weight.detach() for weight in self.model.parameters()), *momenta]
        self.copies: dict[int, list[Tensor]] = {}  #: of the state, by the number of steps made
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            order = self.pipe.recv()
            if order != "lost":
                self.orders.put(order)
                continue
            if self.args.how == "cut":
                shut_connections(besides=self.port)
            self.lost.set()

    def run(self) -> None:
        self.pipe.send("ready")
        self.rank = int(self.orders.get())
        if not self.spare:
            self.copies[0] = [value.clone() for value in self.state]
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        group = {"rank": self.rank, "world_size": self.args.ranks, "timeout": TIMEOUT, "enable_reconfigure": True}
        dist.init_process_group("gloo", store=store, **group)
        # Each pass trains until the end or until a rank has died; then new orders place this process again.
        while True:
            self.pipe.send((dist._get_reconfigure_handle(), set(self.copies)))
            with suppress(RuntimeError):
                self.train(*self.orders.get())
                break
            self.lost.wait()
            self.lost.clear()
        digest = hashlib.sha256(torch.cat([value.flatten() for value in self.state]).numpy().data).hexdigest()
        self.pipe.send((digest, self.began))
        self.orders.get()

    def train(self, number: int, handles: Sequence[str], start: int, source: int) -> None:
        """Continue from the step ``start`` as one of the ranks of these handles.

        The rank ``source`` has the state of that step.
        """
        dist._reconfigure(number, [*handles], timeout=PATIENCE).wait()
        copies = self.copies.get(start)
        sent = torch.cat([value.flatten() for value in copies or self.state])
        dist.broadcast(sent, src=source)
        for value, copy in zip(self.state, copies or sent.split([each.numel() for each in self.state]), strict=True):
            value.copy_(copy.view_as(value))
        self.copies = {start: [value.clone() for value in self.state]}
        ddp = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.1, init_sync=False)
        try:
            for _ in range(2):  # the first pass has other buckets, whose sums differ in the last bits
                self.gradients(ddp, start)
            for step in range(start, STEPS):
                self.gradients(ddp, step)
                self.optimizer.step()
                self.copies = {step: self.copies[step], step + 1: [value.clone() for value in self.state]}
                if step == start:
                    self.began = time.monotonic()
                self.steps.value = step + 1
        finally:
            ddp._remove_autograd_hooks()

    def gradients(self, ddp: nn.Module, step: int) -> None:
        if self.lost.is_set():
            raise RuntimeError("a rank has died")
        self.optimizer.zero_grad()
        dice = torch.Generator().manual_seed(1000 * step + self.rank)
        inputs, labels = torch.randn(32, 64, generator=dice), torch.randint(10, (32,), generator=dice)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()


def shut_connections(besides: int) -> None:
    """Shut all TCP connections of this process down but those to a port."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] != besides:
                end.shutdown(socket.SHUT_RDWR)


def work(*arguments: Any) -> None:
    Rank(*arguments).run()


class Run:
    """The processes of a run, the spare last. ``slots`` are those that are ranks, in their order."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.steps, self.pipes, self.processes = context.RawValue("i"), [], []
        self.slots = [*range(args.ranks)]
        for slot in range(args.ranks + 1):
            ours, theirs = context.Pipe()
            arguments = (args, slot == args.ranks, self.store.port, theirs, self.steps)
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def train(self, dice: random.Random | None) -> tuple[set[str], float]:
        """Return the digests of all ranks' states, and the seconds to the next step.

        The seconds are from the kill to the next step of all ranks. Without ``dice`` there is no kill, and they mean
        nothing.
        """
        self.heard(range(len(self.pipes)))
        for rank in self.slots:
            self.pipes[rank].send(rank)
        self.begin(1)
        killed = self.kill(dice) if dice is not None else 0.0
        digests, began = zip(*self.heard(self.slots), strict=True)
        return {*digests}, max(began) - killed

    def heard(self, slots: Sequence[int]) -> list[Any]:
        if not all(self.pipes[slot].poll(PATIENCE.total_seconds()) for slot in slots):
            raise TimeoutError
        return [self.pipes[slot].recv() for slot in slots]

    def begin(self, number: int) -> None:
        handles, copies = zip(*self.heard(self.slots), strict=True)
        start = max(set.intersection(*(steps for steps in copies if steps)))  # the spare has none
        for slot in self.slots:
            self.pipes[slot].send((number, handles, start, [start in steps for steps in copies].index(True)))

    def kill(self, dice: random.Random) -> float:
        victim, step, spare = dice.choice(self.slots), dice.randrange(5, STEPS - 15), len(self.slots)
        # The second pass measures a step; the kill comes within the length of two.
        for _ in range(2):
            began = time.monotonic()
            while self.steps.value < step:
                time.sleep(0.0005)
            step += 1
        time.sleep(dice.uniform(0, 2 * (time.monotonic() - began)))
        self.processes[victim].kill()
        killed = time.monotonic()
        wait([self.processes[victim].sentinel])
        for slot in {*self.slots} - {victim}:
            self.pipes[slot].send("lost")
        # The spare takes the rank of the dead process.
        self.pipes[spare].send(victim)
        self.slots[victim] = spare
        self.begin(2)
        return killed

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def train(args: argparse.Namespace, dice: random.Random | None) -> tuple[set[str], float]:
    run = Run(args)
    try:
        return run.train(dice)
    finally:
        run.close()


def main() -> None:
    """Kill, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--width", type=int, default=256, help="of the model's middle layer, which has most weights")
    parser.add_argument("--how", choices=["cut", "wait"], default="cut")
    record.add_option(parser)
    args = parser.parse_args()
    took, right = [], 0
    undisturbed, _ = train(args, None)
    for _ in range(args.runs):
        with suppress(EOFError, OSError):  # a process has ended, or says nothing
            found, seconds = train(args, random.Random())
            right += found == undisturbed
            took.append(seconds)
    took.sort()
    waited = sum(seconds > TIMEOUT.total_seconds() for seconds in took)
    p99 = took[min(len(took) - 1, round(0.99 * len(took)))]
    print(
        f"{args.ranks} ranks, {args.how}: {right} of {args.runs} runs right, {waited} waited for gloo's time-out; ",
        end="",
    )
    print(
        f"seconds to the next step of all: median {statistics.median(took):.3f}, p99 {p99:.3f}, longest {took[-1]:.3f}"
    )
    rows = [record.row("runs that end right", [100 * right / args.runs], "%", better="more")]
    rows.append(record.row("runs that waited for gloo's time-out", [waited], "", better="less"))
    rows.append(record.row(f"kill to the next step of all {args.ranks} ranks", took))
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
