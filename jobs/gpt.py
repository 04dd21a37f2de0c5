"""A small GPT on bytes, the model of jobs/language_model.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPT(nn.Module):
    """A decoder of pre-norm blocks on bytes (Radford et al. 2019); ``length`` is the longest input."""

    #: How ranks may compute its layers together, see toolkit/strategies/layouts/plan.py.
    tensor_plan = (
        dict.fromkeys(["embed.bytes", "embed.places", "blocks.*.gather", "blocks.*.think.3"], "rowwise")
        | dict.fromkeys(["blocks.*.attend", "blocks.*.think.1"], "colwise")
        | dict.fromkeys(["blocks.*.norm", "blocks.*.think.0", "norm"], "sequence")
        | {"head": "gathered"}
    )

    def __init__(self, blocks: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = Embed(width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, length, 256) of the byte that follows each of ``inputs`` (n, length)."""
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class Embed(nn.Module):
    """A vector for each byte and one for its place: one layer, so that a single tensor goes from layer to layer."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        return self.bytes(inputs) + self.places(places)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention to what came before, then two layers for each place by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.norm, self.attend, self.gather = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.think = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, hidden: Tensor) -> Tensor:
        # (n, length, heads, 3, head width); heads first, and as many as there are: of a cut layer whole ones come out
        parts = self.attend(self.norm(hidden)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = parts.permute(3, 0, 2, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.gather(seen.transpose(1, 2).flatten(2))
        return hidden + self.think(hidden)  # type: ignore[no-any-return]
