"""Texts that a trained language model continues, for `toolkit generate`.

The model maps tokens (n, length) to logits (n, length, vocabulary) of the token that follows each, and no token changes
the logits before it. So texts of several lengths are one batch, filled up at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from toolkit.base.errors import JobFailedError, RequestError
from toolkit.plugins.inference.trained_model import Trained, precision

#: Tokens that are added to a text where the caller does not say how many, if the model can see that many.
MOST = 64
#: Logits of a pass that are held in memory at once.
LOGITS = 1 << 27


@runtime_checkable
class Vocabulary(Protocol):
    """What a language model's job knows of its tokens, such as what `toolkit.load_tokens` returns."""

    index: Any  #: has ``vocabulary``: tokens are below it; and ``end``: the one that ends a document

    def ids(self, text: str) -> list[int]: ...

    def text(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen by its logits."""

    temperature: float = 1.0  #: 0: the most likely token
    top_k: int | None = None  #: only these most likely ones
    seed: int = 0

    def choose(self, logits: Tensor, draw: torch.Generator) -> int:
        """Return the number of a token, by ``logits`` (vocabulary,) on the CPU."""
        if not logits.isfinite().all():
            raise JobFailedError("the model's outputs are not finite: its training has diverged; take an older step")
        if self.temperature == 0:
            return int(logits.argmax())
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return int(torch.multinomial((logits / self.temperature).softmax(0), 1, generator=draw))


class _Text:
    """A text that is being continued."""

    def __init__(self, text: str, prompt: list[int], most: int, end: int, draw: torch.Generator) -> None:
        self.text, self.ids, self.draw = text, [*prompt], draw
        self._begin, self._full, self._end = len(prompt), len(prompt) + most, end

    @property
    def has_ended(self) -> bool:
        return self.ids[self._begin :][-1:] == [self._end]

    @property
    def is_over(self) -> bool:
        return self.has_ended or len(self.ids) == self._full

    @property
    def added(self) -> list[int]:
        """Return the new tokens, without the one that ends a document."""
        return self.ids[self._begin : len(self.ids) - self.has_ended]


def continuations(trained: Trained, texts: Sequence[str], most: int | None, sampling: Sampling) -> list[dict[str, Any]]:
    """Return what follows each text. Each has ``prompt``, ``text``, the number of ``tokens``, and ``ended``.

    ``ended`` is true where the model has ended the document. A text gets ``most`` tokens, by default 64 or what the
    model can see, and fewer where it has ended. What is drawn for a text depends on its place among ``texts`` and not
    on the others. Raises RequestError where the job is no language model, and for a text that has no tokens or too
    many.
    """
    job = trained.job
    tokens, context = job.tokens, job.context
    if not isinstance(tokens, Vocabulary) or context is None:
        raise RequestError(
            f"toolkit generate: {trained.config.job} of run {trained.run.id} is no language model: it sets neither "
            "`tokens` nor `context`, see jobs/language_model.py"
        )
    rows = []
    for number, text in enumerate(texts):
        # The model must see all of the text and what is to follow.
        prompt = tokens.ids(text)
        if len(prompt) + (most or 1) > context:
            raise RequestError(
                f"toolkit generate: {shortened(text)} has {len(prompt)} tokens, which with {most or 1} more are over "
                f"the {context} that the model was trained on; shorten it, or lower --max-tokens"
            )
        draw = torch.Generator().manual_seed(sampling.seed + number)
        room = min(MOST, context - len(prompt)) if most is None else most
        rows.append(_Text(text, prompt, room, tokens.index.end, draw))
    # One pass takes as many texts as its logits may take memory.
    at_once = max(1, LOGITS // (context * tokens.index.vocabulary))
    for start in range(0, len(rows), at_once):
        _extend(trained, rows[start : start + at_once], tokens.index.vocabulary, sampling)
    return [
        {"prompt": row.text, "text": tokens.text(row.added), "tokens": len(row.added), "ended": row.has_ended}
        for row in rows
    ]


def shortened(text: str) -> str:
    """Return the beginning of a text in quotes, on one line."""
    return repr(text if len(text) <= 48 else f"{text[:45]}...")


@torch.no_grad()
def _extend(trained: Trained, rows: Sequence[_Text], vocabulary: int, sampling: Sampling) -> None:
    """Add tokens to the rows until each is over."""
    while going := [row for row in rows if not row.is_over]:
        batch = torch.zeros(len(going), max(len(row.ids) for row in going), dtype=torch.int64)
        for place, row in enumerate(going):
            batch[place, : len(row.ids)] = torch.tensor(row.ids)
        with precision(trained):
            logits = trained.model(batch.to(trained.device))
        ends = [len(row.ids) - 1 for row in going]
        # A model with more outputs than the tokenizer has tokens was never trained on the others.
        last = logits[range(len(going)), ends, :vocabulary].float().cpu()
        for row, outputs in zip(going, last, strict=True):
            row.ids.append(sampling.choose(outputs, row.draw))
