"""What a classifier is trained on and judged by; the shapes a job's own criterion and measure must have."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Criterion: cross entropy of logits (n, classes) against class numbers (n,), each sample weighing one."""
    return _summed(outputs, targets), None


def classification(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Measure: the sums behind ``loss`` (mean cross entropy) and ``accuracy`` (share of right answers, 0 to 1)."""
    right = (outputs.argmax(dim=1) == targets).sum()
    return {"loss": _summed(outputs, targets), "accuracy": right}


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """In fp32 also under autocast: a sum over a batch in bf16 would have two or three right digits."""
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
