"""The buckets in which DistributedDataParallel sums gradients, kept over a resume.

A new DDP fills its buckets in the reverse order of the parameters. After its first summed backward pass it builds them
anew, in the order in which the gradients were ready, and keeps these to the end. On three ranks or more a gradient's
sum depends on its place in a bucket, so a resumed run whose DDP began as a new one would differ in the last bits.
Therefore a checkpoint has the order, and a resumed run's DDP is given it before its first pass. Nothing is computed for
that, so a script's hooks, buffers and generators do not notice. With ``find_unused_parameters`` the first buckets stay.

Not kept: with ``gradient_as_bucket_view`` torch divides gradients that ``zero_grad(set_to_none=False)`` has left by the
number of ranks, and multiplies new ones by its reciprocal. Of numbers that are no power of two the bits differ.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from toolkit.ranks.state import Json


class DdpBuckets:
    """Every DDP that this process makes from here on, in that order. Every rank makes the same calls."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[DistributedDataParallel]] = []
        self._orders: dict[int, list[int]] = {}  #: of parameters in the buckets, by the number of the DDP
        self._saved: dict[int, list[int]] = {}  #: those of the checkpoint
        self._arranged = 0  #: how many have been looked at
        self._hook = register_module_module_registration_hook(self._note)

    def close(self) -> None:
        """Look for no more."""
        self._hook.remove()

    def _note(self, module: nn.Module, name: str, _child: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            self._made.append(weakref.ref(module))

    def add_around(self, modules: Iterable[nn.Module]) -> None:
        """Take the DDPs that were made around ``modules`` before this object, in their order."""
        made = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        around = {id(each.module): each for each in made}
        self._made += [weakref.ref(around[id(module)]) for module in modules if id(module) in around]

    def orders(self) -> list[Json]:
        """Return what a checkpoint holds: the order of each DDP, None of one that has its first buckets. Collective."""
        for number, made in enumerate(self._made):
            ddp = made()
            if ddp is not None and number not in self._orders and _rebuilds(ddp) and _is_rebuilt(ddp):
                self._orders[number] = _order(ddp)
        return [self._orders.get(number) for number in range(len(self._made))]

    def take(self, meta: Mapping[str, Any]) -> None:
        """Take the orders of a checkpoint's ``meta``."""
        orders = meta.get("ddp_orders", [])
        self._saved = {number: order for number, order in enumerate(orders) if order is not None}

    def arrange(self) -> None:
        """Give the DDPs that are there when the loop begins the order they had, before their first pass. Collective.

        One that the loop makes later begins like a new one also where nothing was interrupted.
        """
        first, self._arranged = self._arranged, len(self._made)
        saved, self._saved = self._saved, {}
        for number, made in enumerate(self._made[first:], first):
            ddp = made()
            if ddp is None or not _rebuilds(ddp):
                continue
            # One with its first buckets begins with these again. Where the order is of other parameters, a later DDP
            # had taken its place, as one that was made for unfrozen layers.
            orders = [saved[number], *reversed(saved.values())] if number in saved else []
            if ddp.static_graph:
                # Such a DDP rebuilds after its second pass, too late for a checkpoint of the first step.
                trained = [each.requires_grad for each in ddp.module.parameters()]
                orders.append([place for place in reversed(range(len(trained))) if trained[place]])
            for order in orders:
                if _set_order(ddp, order):
                    self._orders[number] = order
                    break


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """True if it builds its buckets anew, on all ranks: of a group of some ranks the others have another DDP."""
    if not hasattr(ddp, "reducer") or ddp._use_python_reducer or (ddp.find_unused_parameters and not ddp.static_graph):
        return False
    return ddp.process_group.size() == dist.get_world_size()


def _is_rebuilt(ddp: DistributedDataParallel) -> bool:
    # What torch does before the next forward pass. A checkpoint before that would have the first buckets.
    return ddp.reducer._rebuild_buckets() or ddp._has_rebuilt_buckets


def _order(ddp: DistributedDataParallel) -> list[int]:
    """Return the parameters by their number in the module, frozen ones counted, as they lie in the buckets."""
    numbers = {id(parameter): number for number, parameter in enumerate(ddp.module.parameters())}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # as much memory as the gradients, for this moment
    return [numbers[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]


def _set_order(ddp: Any, order: list[int]) -> bool:
    """Make the reducer anew, as DDP does when it is unpickled, with buckets in ``order``.

    Return False, and leave it, where the ``order`` is of other parameters.
    """
    if len(order) != ddp._get_ddp_logging_data()["num_parameter_tensors"]:
        return False
    all_of_it = list(ddp.module.parameters())
    wanted = [all_of_it[number] for number in order if number < len(all_of_it)]
    frozen = [parameter for parameter in wanted if not parameter.requires_grad]  # since the DDP was made
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        parameters, is_sparse = ddp._build_params_for_reducer()
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        if {id(parameter) for parameter in wanted} != places.keys():
            return False
        now = [places[id(parameter)] for parameter in wanted]
        names = ddp._build_debug_param_to_name_mapping(parameters)
        built_in = ddp._get_ddp_logging_data().get("comm_hook", "").removeprefix("BuiltinCommHookType.")
        ddp._ddp_init_helper(
            wanted,
            [is_sparse[place] for place in now],
            {number: names[place] for number, place in enumerate(now) if place in names},
            ddp.static_graph,
        )
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    # The rest of what the DDP has set in its first reducer.
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)
    if built_in in dist.BuiltinCommHookType.__members__:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.__members__[built_in])
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wanted):
        ddp.reducer._set_optimizer_in_backward()
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()
    ddp._has_rebuilt_buckets = True
    return True
