"""The loss and the figures of a classifier, for samples that are pairs (input, class)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from toolkit.ranks.batch import Batch
from toolkit.strategies.objective import Forward


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of logits (n, classes) against class numbers (n,), for each sample.

    It is in fp32 also under autocast: a sum over a batch in bf16 would have two or three right digits.
    """
    return functional.cross_entropy(outputs.float(), targets, reduction="none")


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Return the summed cross entropy of logits (n, classes) and class numbers (n,), as a criterion.

    Each sample weighs one.
    """
    return functional.cross_entropy(outputs.float(), targets, reduction="sum"), None


def classification(model: Forward, batch: Batch) -> dict[str, Tensor]:
    """Return ``loss`` (cross entropy) and ``accuracy`` (share of right answers, 0 to 1), as a measure."""
    outputs = model(batch.inputs)
    return {"loss": _losses(outputs, batch.targets), "accuracy": outputs.argmax(dim=1) == batch.targets}
