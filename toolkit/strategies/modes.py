"""Training and evaluation mode, module by module. What a job has frozen (a BatchNorm in ``eval()``) stays frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from toolkit.base import logs
from toolkit.base.errors import listing

log = logs.get(__name__)


def in_training(model: nn.Module) -> nn.Module:
    """Return ``model`` in training mode. Modules that its factory left in evaluation mode stay in it.

    A model that is in evaluation mode as a whole, as some libraries return them, goes into training mode as a whole.
    """
    if not model.training:
        model.train()
    frozen = [name for name, module in model.named_modules() if not module.training]
    if frozen:
        log.info("in evaluation mode while training, as the model was made: %s", listing(frozen, 5))
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; afterwards each module returns to its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
