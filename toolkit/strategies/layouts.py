"""How a model lies on the ranks. ddp, fsdp and zero differ only in that, and so does tensor.

ddp has the whole model on every rank, by torch's DistributedDataParallel. So have the models that send nothing: a
replica between two meetings of local SGD, and nn.DataParallel.

With fsdp and zero each rank keeps 1/N of every parameter, gradient and optimizer state. Both are torch's FSDP2. fsdp
frees a block's weights after its forward pass and gathers them again for the backward pass. zero keeps them until
then, which saves a third of what is sent and costs the memory of the whole weights. (These are stages 3 and 2 of ZeRO,
https://arxiv.org/abs/1910.02054, except that between steps the weights lie sharded in both.) With
``strategy.mesh.replicas`` the ranks form several copies of the model, each in parts. Weights are gathered within a copy
only, and the summed parts of the gradients are then summed once over the copies (hybrid sharding).

`strategy.mesh` is the ranks as a grid with one dimension for each kind of parallelism. Consecutive ranks, which are
mostly those of one node, are neighbors in the last dimension. So ``tensor``, whose ranks communicate several times in
each layer, stays within a node. Then come the shards of a copy, then the copies, which communicate once in a step.

The first weights of a model that lies in parts are bit for bit those of the same model on one process. Only rank 0
makes the model, in host memory. The others make it without memory (torch's ``meta`` device) and receive their parts,
one tensor at a time. If each rank drew its own part, it would have to know in which order any model draws.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from toolkit.base import logs, torch_version
from toolkit.base.errors import ConfigError, listing
from toolkit.config import MeshConfig, choose
from toolkit.devices import accelerator
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import broadcast_tensors, set_timeouts
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Sharded, entry, local
from toolkit.strategies.models import blocks, checkpoint_activations
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.priming import params_without_grad, unused_message
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


class Layout(Protocol):
    """Puts the model on the ranks and decides what a pass through it sends.

    A layout inherits this class. The methods with a body are the defaults: there is nothing to do.
    """

    #: The part of each global batch that this rank works on. It is known before the model is.
    share: Share

    #: True if every forward pass waits for the other ranks, so that all must make equally many of them.
    passes_are_joint: bool

    #: True if this rank's values count in sums over all ranks. Of the ranks that work on one share together, one
    #: counts.
    counts: bool

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Return the model on the device, laid out, with rank 0's weights. Every rank calls it.

        Names are those of ``make()``. ``trial`` passes a few samples through a model.
        """

    def verify_model(self) -> None:
        """Raise ConfigError if the model computes something else than the whole one would.

        All ranks call it, once buffers are equal, and all raise it.
        """
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make a pass whose backward pass averages the gradients over the ranks."""

    def without_sync(self) -> AbstractContextManager[object]:
        """Let passes inside it only add to this rank's gradients. A pass outside of it follows."""

    def average(self) -> None:
        """Average the gradients after a step's last backward pass, unless that pass has."""
        return

    def state(self) -> dict[str, Entry]:
        """Return what a resume needs besides weights, buffers and the optimizer's state."""
        return {}

    def mark_shards(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Return ``entries`` with the places of their parts, where these follow from the layers' cut.

        ``entries`` are made by `toolkit.ranks.state.entry` and named as in a checkpoint.
        """
        return entries

    def step_metrics(self) -> Mapping[str, float]:
        """See ``Strategy.step_metrics``. Called once more after priming, whose figures are dropped."""
        return {}

    def precision(self) -> AbstractContextManager[object]:
        """Set the precision in which passes and the losses are computed."""

    def reshard(self) -> None:
        """Give the model the parameters that the optimizer has, after passes without a backward pass."""
        return


_HALVES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Compute passes inside it as ``train.precision`` says, with weights in fp32."""
    half = choose("train.precision", precision, _HALVES)
    return nullcontext() if half is None else torch.autocast(device.type, half)


# ----------------------------------------------------------------------------------------- the whole model on each rank


def use_channels_last(model: nn.Module) -> None:
    """Lay out ``model``'s parameters of four dimensions channels-last, and each such input when it arrives.

    Most convolutions for GPUs with tensor cores, and oneDNN's for CPUs, would convert each time. Checkpoints do not
    depend on it: tensors are written in the order of their dimensions.
    """
    model.to(memory_format=torch.channels_last)
    if not any(parameter.ndim == 4 for parameter in model.parameters()):
        log.warning("train.channels_last changes nothing: this model has no weights of four dimensions")
        return

    def lay_out(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        laid_out = []
        for value in inputs:
            is_image = isinstance(value, Tensor) and value.ndim == 4
            laid_out.append(value.contiguous(memory_format=torch.channels_last) if is_image else value)
        return tuple(laid_out)

    model.register_forward_pre_hook(lay_out)


#: No broadcast of buffers in each forward pass, see ``OptimizerWrapper.broadcast_buffers``. 2.15 renamed the option.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class Replicas(Layout):
    """See :class:`Layout`. DDP's hooks average in the backward pass; one rank has nothing to average, and no DDP.

    ``static_graph`` is not used: it is silently wrong for a model that leaves out layers.
    """

    passes_are_joint = False
    counts = True

    _model: nn.Module
    _passes: nn.Module  #: the model as passes call it: wrapped, or itself
    _parameters: list[nn.Parameter]

    def __init__(
        self,
        session: Session,
        *,
        precision: str,
        compile: bool,
        recompute: int,
        channels_last: bool = False,
        find_unused: bool = False,
    ) -> None:
        """Take how passes are made.

        With ``find_unused`` a parameter that no rank used in a step has a gradient of zero in it.
        """
        self.share = Share(session.rank, session.world_size)
        self._device = session.device
        self._precision = precision
        self._channels_last = channels_last
        self._compile = compile
        self._recompute = recompute
        self._find_unused = find_unused

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        model = self._made(make)
        self._passes = self._averaging(model) if self.share.count > 1 else model
        self._parameters = list(model.parameters())
        return model

    def _averaging(self, model: nn.Module) -> DistributedDataParallel:
        """Return DDP around ``model``, which gets rank 0's weights."""
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=self._find_unused, **_KEEP_BUFFERS
        )

    def _made(self, make: ModelFactory) -> nn.Module:
        model = self._model = make().to(self._device)
        if self._channels_last:
            use_channels_last(model)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        if self._compile:
            model.compile()  # in place: the names in state() stay those of the model
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._passes(*args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise ConfigError(
                "model: a parameter was used in an early part of the last step (train.accumulate) and not in its last "
                "one, whose pass sends gradients: ddp wants every parameter in every pass"
            ) from error

    def average(self) -> None:
        """Check that every parameter took part, or with ``find_unused`` give the others zeros.

        DDP complains only in the next step. Until then the weights would be those of this rank's gradients alone.
        """
        # A list that is kept: to walk through the modules takes longer than the check itself, in every step.
        unused = [parameter for parameter in self._parameters if parameter.grad is None and parameter.requires_grad]
        if not unused:
            return
        if not self._find_unused:
            raise ConfigError(unused_message(params_without_grad(self._model)))
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)

    def without_sync(self) -> AbstractContextManager[object]:
        passes = self._passes
        return passes.no_sync() if isinstance(passes, DistributedDataParallel) else nullcontext()

    def precision(self) -> AbstractContextManager[object]:
        return autocast(self._device, self._precision)


class LocalReplica(Replicas):
    """See :class:`Layout`. The first weights are rank 0's; gradients are each rank's own."""

    def __init__(
        self, session: Session, *, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **passes: Any
    ) -> None:
        """Take a wrapper for the model; ``passes`` says how passes are made, see Replicas."""
        super().__init__(session, **passes)
        self._wrap = wrap

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        model = self._made(make)
        # DDP would broadcast the first weights; without it nothing else does.
        broadcast_tensors(model.parameters(), source=0)
        self._passes = self._wrap(model)
        return model

    def average(self) -> None:
        """Do nothing: no gradient is averaged."""


def data_parallel(session: Session, *, precision: str, compile: bool, recompute: int) -> LocalReplica:
    """Return the layout of ``nn.DataParallel``: a process gives each of its GPUs a part of every batch.

    Raises ConfigError for several ranks, and for settings that do not work on its copies of the model.
    """
    if session.world_size > 1:
        raise ConfigError(
            f"strategy.name: dp is one process with all GPUs of a node, and there are {session.world_size} ranks; use "
            "ddp, or set cluster.nodes and cluster.tasks_per_node to 1"
        )
    for key, is_set in (("train.compile", compile), ("strategy.activation_checkpointing", recompute)):
        if is_set:
            raise ConfigError(f"{key}: dp copies the model in every step, which this does not survive; use ddp")
    gpus = accelerator.count() if session.device.type != "cpu" else 0
    log.info(
        "dp: a batch is shared by %s of this process, its weights copied and its outputs gathered in every step; "
        "ddp with a rank for each GPU does neither, is faster and goes over several nodes",
        f"the {gpus} GPUs" if gpus > 1 else f"the only {'GPU' if gpus else 'processor'}",
    )
    return LocalReplica(session, precision=precision, compile=False, recompute=0, wrap=nn.DataParallel)


# -------------------------------------------------------------------------------------------------- a part on each rank


class Shards(Layout):
    """See :class:`Layout`. With bf16 the blocks gather and compute in it; gradients are summed in fp32.

    ``compression`` bf16 sends and sums gradients in bf16, which halves what is sent of them.
    """

    passes_are_joint = True

    _model: FSDPModule

    def __init__(
        self,
        session: Session,
        sizes: MeshConfig,
        *,
        precision: str,
        compile: bool,
        recompute: int,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        compression: str = "none",
        prefetch_blocks: int = 1,
    ) -> None:
        if session.device.type == "cpu":
            torch_version.refuse_older([torch_version.SHARDS_ON_CPUS])
        self.share = share_of(session, sizes)
        self.counts = is_first(session, sizes)
        self._session = session
        self._sizes = sizes
        self._offloads = cpu_offload
        self._device = session.device
        self._bf16 = choose("train.precision", precision, {"fp32": False, "bf16": True})
        self._sums = choose("strategy.compression", compression, {"none": torch.float32, "bf16": torch.bfloat16})
        self._compile = compile
        self._recompute = recompute
        self._reshards = reshard_after_forward
        self._ahead = prefetch_blocks

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Shard the model. Raises ConfigError for a model that cannot be sharded."""
        mesh = device_mesh(self._session, self._sizes, ("shards",))
        model = make_on_rank_0(make)
        # Rank 0 keeps the whole tensors for hand_out(); cutting and sharding below change the model's parameters.
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())
        self._refuse(model)
        self.cut(model, mesh, trial)
        data = submesh(mesh, "replicas", "shards")
        assert data is not None
        self._shard(model, data)
        if any(tensor.is_meta for tensor in [*whole.values(), *buffers.values()]):
            # A model made on meta gets its memory only now, as parts. Buffers lie where they are used.
            model.to_empty(device="cpu" if self._offloads else self._device)
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self._device))
        distribute_weights(whole, model, self._device, self.mark_shards)
        return model

    def cut(self, model: nn.Module, mesh: DeviceMesh, trial: TrialPass) -> None:
        """Cut layers that ranks compute together, before a rank's part of them is sharded: none here."""
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Keep whole gradients on each rank meanwhile; zero keeps the gathered weights, too."""
        self._model.set_requires_gradient_sync(False)
        self._model.set_reshard_after_backward(self._reshards)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)
            self._model.set_reshard_after_backward(True)

    def precision(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reshard(self) -> None:
        """Shard the root's weights again, and with zero all weights. They would stay gathered until a backward pass."""
        for module in self._model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard each block, then the rest. Recomputing, compiling and sharding fit together in this order."""
        policy = MixedPrecisionPolicy(torch.bfloat16 if self._bf16 else None, self._sums)
        offload = OffloadPolicy()
        if self._offloads:
            if self._device.type == "cpu":
                why = "ranks without a GPU have all in host memory anyway"
                log.warning("strategy.cpu_offload changes nothing here: %s", why)
            offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        parts = blocks(model)
        if self._recompute:
            checkpoint_activations(model, self._recompute)
        for part in parts or [model] if self._compile else ():
            part.compile()
        # Blocks first: the root then shards only what no block has.
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=self._reshards)
        self._model = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        if self._ahead > 1:  # torch gathers one block ahead by itself
            _prefetch([self._model, *parts], self._ahead)  # type: ignore[list-item]
        log.info("sharded over a mesh of %s: %d blocks and the rest", describe(self._sizes), len(parts))

    def _refuse(self, model: nn.Module) -> None:
        scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
        if scalars:
            raise ConfigError(
                f"strategy.name: {listing(scalars, 3)} has no dimension to cut; give it the shape (1,), or use ddp"
            )
        # Find parameters that a block shares with another one, or with none: 0 stands for modules outside of blocks.
        owners: dict[nn.Module, int] = {}
        for number, block in enumerate(blocks(model), 1):
            owners |= dict.fromkeys(block.modules(), number)
        users: dict[Tensor, set[int]] = defaultdict(set)
        names: dict[Tensor, str] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                users[parameter].add(owners.get(module, 0))
                names.setdefault(parameter, f"{path}.{name}")
        shared = [names[parameter] for parameter, found in users.items() if len(found) > 1]
        if shared:
            raise ConfigError(
                f"strategy.name: blocks of this model share parameters ({listing(shared, 3)}), which would be gathered "
                "and let go at different times; use ddp"
            )
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        if self._bf16 and norms:
            raise ConfigError(
                f"train.precision: {listing(norms, 3)} keeps statistics in fp32, which do not go with sharded weights "
                "in bf16; use fp32, ddp, or a model without BatchNorm"
            )


def _prefetch(modules: Sequence[FSDPModule], ahead: int) -> None:
    """Gather the weights of ``ahead`` modules before they are needed. ``modules`` are the root and then the blocks."""
    for number, module in enumerate(modules):
        module.set_modules_to_forward_prefetch([*modules[number + 1 : number + 1 + ahead]])
        module.set_modules_to_backward_prefetch([*reversed(modules[max(1, number - ahead) : number])])
    modules[0].set_modules_to_backward_prefetch([*reversed(modules[-ahead:])])


# -------------------------------------------------------------------------------------------------- the ranks as a grid

#: From the outermost to the innermost.
ORDER = ("replicas", "shards", "tensor")


def device_mesh(session: Session, sizes: MeshConfig, always: Iterable[str]) -> DeviceMesh:
    """Return a mesh of the dimensions in ``always`` and of those with several ranks. Every rank calls it.

    Other dimensions of one rank are left out, since each costs a process group.
    """
    if session.is_main and _size(sizes, "tensor") > int(os.environ.get("LOCAL_WORLD_SIZE", session.world_size)):
        log.warning("strategy.mesh.tensor: groups of %d ranks go beyond a node, which is slow", _size(sizes, "tensor"))
    kept = [name for name in ORDER if _size(sizes, name) > 1 or name in always]
    return open_mesh(session, {name: _size(sizes, name) for name in kept})


def open_mesh(session: Session, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of these dimensions, whose groups have the session's time limit. Every rank calls it.

    torch's own limit is 30 minutes, 10 over NCCL, and a hang in a group would last that long.
    """
    mesh = init_device_mesh(session.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    set_timeouts((mesh.get_group(name) for name in sizes), session.timeout)
    return mesh


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Return this rank's part of the mesh along those of ``names`` that it has; None if it has none."""
    found = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[found] if found else None


def share_of(session: Session, sizes: MeshConfig) -> Share:
    """Return the rank's share. Consecutive ranks form a tensor group, and work on the same samples."""
    together = _size(sizes, "tensor")
    return Share(session.rank // together, session.world_size // together)


def is_first(session: Session, sizes: MeshConfig) -> bool:
    """True if this rank counts for its tensor group where something must count once."""
    return session.rank % _size(sizes, "tensor") == 0


def describe(sizes: MeshConfig) -> str:
    """Return ``2 replicas x 4 shards``, for the log."""
    return " x ".join(f"{size} {name}" for name in ORDER if (size := _size(sizes, name)) > 1) or "1 rank"


def _size(sizes: MeshConfig, name: str) -> int:
    size: int | None = getattr(sizes, name)
    assert size is not None, "config.mesh_of() leaves no dimension open"
    return size


def make_on_rank_0(make: ModelFactory) -> nn.Module:
    """Return ``make()`` on rank 0; elsewhere the model without memory, if that is possible."""
    return make() if dist.get_rank() == 0 else make_on_meta(make)


def make_on_meta(make: ModelFactory) -> nn.Module:
    """Return ``make()`` on the meta device. If its constructor needs the values of tensors, it is made for real."""
    try:
        with torch.device("meta"):
            model = make()
        # A tensor that is a plain attribute gets no values later: only parameters and buffers do.
        attributes = [item for module in model.modules() for item in vars(module).items()]
        stray = [name for name, value in attributes if isinstance(value, Tensor) and value.is_meta]
        if not stray:
            return model
        reason = f"{listing(stray, 3)}: tensors that are neither parameters nor buffers"
    except Exception as error:  # any constructor may fail in its own way on tensors without values
        reason = f"{type(error).__name__}: {error}"
    log.warning("each rank makes the whole model in host memory first, for it cannot be made without (%s)", reason)
    return make()


@torch.no_grad()
def distribute_weights(
    whole: Mapping[str, Tensor],
    model: nn.Module,
    device: torch.device,
    uncut: Callable[[Mapping[str, Entry]], Mapping[str, Entry]] = lambda entries: entries,
) -> None:
    """Fill the parameters of ``model``, parts or copies, from rank 0's ``whole`` ones.

    They are sent one after the other, each whole. So a rank that has room for the largest one has room for this,
    however the parts are cut. On the other ranks only the names in ``whole`` count. ``uncut``: its ``mark_shards``.
    """
    for name, parameter in model.named_parameters():
        sent = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if dist.get_rank() == 0:
            sent.copy_(whole[name])
        dist.broadcast(sent, 0)
        # A fused parameter lies in several pieces; each is copied from its place in the whole one.
        mine = uncut({f"model/{name}": entry(parameter)})[f"model/{name}"]
        pieces = mine.pieces() if isinstance(mine, Sharded) else [(local(parameter), (0,) * sent.ndim)]
        for value, offsets in pieces:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, value.shape, strict=True))
            value.copy_(sent[place])
