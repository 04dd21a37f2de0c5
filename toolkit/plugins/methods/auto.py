"""auto: ddp if the model leaves room on the device, else zero, else fsdp. The log says which, and why.

What a rank must keep is measured on torch's ``meta`` device: weights, gradients and the optimizer's state. Activations
depend on the batch, so the first strategy that leaves ``ROOM`` of the memory to them is taken. ddp comes first, for it
sends least, then zero (https://arxiv.org/abs/1910.02054 gives the sums below). Rank 0 decides, by the smallest memory
of all ranks. A resume on as many ranks makes the same choice, even on nodes with more memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base import fsio, logs, this_node
from toolkit.config import StrategyConfig, TrainConfig
from toolkit.devices import accelerator
from toolkit.files import records
from toolkit.files.records import FileRecord
from toolkit.files.rundir import RunDir
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import build_layout
from toolkit.strategies.layouts import Layout, make_on_meta
from toolkit.strategies.models import blocks
from toolkit.strategies.objective import Objective
from toolkit.strategies.priming import same_randomness
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory, Strategy
from toolkit.strategies.spmd import Spmd

#: The part of a device's memory that is left to activations, buffers of messages and what the libraries take.
ROOM = 0.4

log = logs.get(__name__)


@dataclass(frozen=True)
class Choice(FileRecord):
    """``strategy.json``: the strategy that was taken for this number of ranks, and why."""

    ranks: int
    strategy: Annotated[str, records.one_of("ddp", "zero", "fsdp")]
    why: str


class Auto(Spmd):
    """A strategy by ``layout``, which makes that of ddp, zero or fsdp; each rank has its own share in all three."""

    def __init__(self, session: Session, layout: Callable[[str], Layout], train: TrainConfig) -> None:
        super().__init__(session, layout("ddp"), train)
        self._session = session
        self._layout_of = layout

    def build(
        self, model: ModelFactory, optimizer: OptimizerFactory, objective: Objective, sample: Batch | None
    ) -> None:
        size = measure(model, optimizer)  # on all ranks: an optimizer may compare the parameters of all of them
        bf16, accumulates = self._train.precision == "bf16", self._train.accumulate > 1
        name = _agreed(self._session, partial(pick, size, self._session.world_size, bf16=bf16, accumulates=accumulates))
        self._layout = self._layout_of(name)
        self.evaluates_together = self._layout.passes_are_joint
        super().build(model, optimizer, objective, sample)


@dataclass(frozen=True)
class Size:
    """Bytes of a model that one process would keep. ``block`` and ``rest`` count the weights only."""

    weights: int
    gradients: int
    slots: int  #: the optimizer's state
    block: int  #: the largest block
    rest: int  #: what is in no block

    @property
    def kept(self) -> int:
        """Return the bytes kept from one step to the next, and the gradients in between."""
        return self.weights + self.gradients + self.slots


def needs(size: Size, ranks: int, *, bf16: bool = False, accumulates: bool = False) -> dict[str, float]:
    """Return the bytes on a rank for each strategy, without activations. The one that sends least comes first."""
    part = size.kept / ranks + (size.gradients if accumulates else 0)  # gradients stay whole until the last micro-batch
    width = 0.5 if bf16 else 1.0  # only gathered weights are bf16; kept ones stay as made
    return {
        "ddp": size.kept,
        "zero": part + width * size.weights,
        "fsdp": part + width * (size.rest + 2 * size.block),  # a block, and the next one, gathered ahead
    }


def pick(
    size: Size, ranks: int, memory_bytes: int, *, bf16: bool = False, accumulates: bool = False
) -> tuple[str, str]:
    """Return the strategy for a model of this size, and why, in a sentence. Each rank has ``memory_bytes``."""
    required = needs(size, ranks, bf16=bf16, accumulates=accumulates)
    # One rank has nothing to shard over. fsdp is the last choice, even if its need is too large.
    room = (1 - ROOM) * memory_bytes
    fitting = [name for name, need in required.items() if need <= room]
    name = "ddp" if ranks == 1 else [*fitting, "fsdp"][0]
    parts = {"weights": size.weights, "gradients": size.gradients, "slots": size.slots}
    of = " + ".join(f"{fsio.size_text(part)} {kind}" for kind, part in parts.items() if part)
    tried = ", ".join(f"{other} {fsio.size_text(need)}" for other, need in required.items())
    filled = f"{fsio.size_text(room)} of its {fsio.size_text(memory_bytes)} may be filled so"
    why = f"{of}; a rank would keep: {tried}; {filled}"
    if required[name] > room:
        why += (
            ". That is more than there is: try strategy.activation_checkpointing, train.precision bf16, more ranks, or "
            "fsdp with strategy.cpu_offload"
        )
    elif name == "fsdp":
        why += ". If activations do not fit, set strategy.activation_checkpointing"
    return name, why


def _agreed(session: Session, decide: Callable[[int], tuple[str, str]]) -> str:
    """Return rank 0's choice, on every rank. A choice that the run made earlier for as many ranks stands."""
    # The rank with the least memory decides for all.
    memory = torch.tensor(memory_bytes(session.device), dtype=torch.int64, device=session.device)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    path = RunDir(session.run_dir).strategy

    def choose() -> dict[str, Any]:
        kept = Choice.read(path)
        if kept is not None and kept.ranks == session.world_size:
            kept = kept.replace(why=f"{kept.why} (as decided when the run began on so many ranks, see {path.name})")
            return kept.to_json()
        decided = Choice(session.world_size, *decide(int(memory.item()))).to_json()
        fsio.write_json(path, decided)
        return decided

    choice = Choice.from_json(session.from_main("strategy.name", choose))
    log.info("strategy.name: auto takes %s: %s", choice.strategy, choice.why)
    return choice.strategy


def measure(make: ModelFactory, optimizer: OptimizerFactory) -> Size:
    """Return the bytes of the model and of its optimizer's state after a step. Random states stay as they were."""
    with same_randomness():  # the training makes the model again and must draw the same numbers
        model = make_on_meta(make).to("meta")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            # A step on meta makes the slots' shapes without memory.
            stepper = optimizer(model)
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            stepper.step()
            kept = [value for of_one in stepper.state.values() for value in of_one.values()]
            slots = _bytes(value for value in kept if isinstance(value, Tensor))
        except Exception as error:  # any optimizer may fail in its own way on tensors without values
            log.warning("the optimizer's state is taken to be two values for each weight (%s)", error)
            slots = 2 * _bytes(trained)
    weights, parts = _bytes(model.parameters()), [_bytes(block.parameters()) for block in blocks(model)]
    largest = max(parts, default=0)
    return Size(weights, _bytes(trained), slots, largest, weights - sum(parts))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def memory_bytes(device: torch.device, environ: Mapping[str, str] | None = None) -> int:
    """Return the bytes of the rank's GPU. Without one: its part of what its node, or its job there, may use."""
    if device.type != "cpu":
        with suppress(AttributeError):  # of a package's device, which does not tell
            return int(accelerator.module_of(device).get_device_properties(device).total_memory)
    ranks = int((os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1"))
    return this_node.total_memory_bytes() // ranks


def build(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return the strategy; its model is not built yet."""
    return Auto(session, lambda name: build_layout(name, config, session, train), train)
