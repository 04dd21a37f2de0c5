"""The loss and the figures of a classifier, for samples that are pairs (input, class)."""

from torch import Tensor
from torch.nn import functional

from toolkit.ranks.batch import Batch
from toolkit.strategies.objective import Forward


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Return the summed cross entropy of logits and classes, as a criterion. Each sample weighs one.

    ``outputs`` are (n, classes), ``targets`` class numbers (n,). The sum is in fp32 also under autocast: in bf16 it
    would have two or three right digits.
    """
    return functional.cross_entropy(outputs.float(), targets, reduction="sum"), None


def classification(model: Forward, batch: Batch) -> dict[str, Tensor]:
    """Return ``loss`` (cross entropy) and ``accuracy`` of each sample (n,), as a measure.

    The mean accuracy is the share of right answers, 0 to 1.
    """
    outputs = model(batch.inputs)
    losses = functional.cross_entropy(outputs.float(), batch.targets, reduction="none")
    return {"loss": losses, "accuracy": outputs.argmax(dim=1) == batch.targets}
