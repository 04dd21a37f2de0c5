"""A Llama-shaped decoder, the model of jobs/language_model.py. Its parameters have Hugging Face's names.

RMSNorm before each part (https://arxiv.org/abs/1910.07467), rotary positions (https://arxiv.org/abs/2104.09864), SwiGLU
(https://arxiv.org/abs/2002.05202) and grouped-query attention (https://arxiv.org/abs/2305.13245).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from toolkit import ConfigError

#: The standard deviation of the first weights.
STD = 0.02
#: The kinds of ``rope_scaling``, and the figures that each needs.
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class LlamaSizes:
    """The shape of a decoder; ``hidden`` is the width inside of a block's SwiGLU."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int  #: groups of heads, which share their keys and values
    hidden: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False  #: True: the embedding is the head, too
    #: How positions are scaled, as ``rope_scaling`` of Hugging Face says it; None: not.
    rope_scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ConfigError(f"params.heads: {self.heads} heads do not make even parts of params.width {self.width}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"params.kv_heads: {self.kv_heads} does not divide params.heads ({self.heads})")

    @classmethod
    def read(cls, path: Path) -> LlamaSizes:
        """Return the sizes in the file ``path``, a ``config.json`` of Hugging Face. Raises ConfigError."""
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"params.hf_config: {path} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"params.hf_config: {path} is no config.json of a model")
        return cls.of_hugging_face(config, str(path))

    @classmethod
    def of_hugging_face(cls, config: Mapping[str, Any], where: str) -> LlamaSizes:
        """Return the sizes in a ``config.json`` of Hugging Face, read from ``where``.

        Raises ConfigError for a model that this decoder is not: another activation, biases, other positions.
        """
        # Older and newer versions of transformers have these keys.
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in SCALINGS:
            raise ConfigError(
                f"params.hf_config: {where}: rope_type is {kind}, and jobs/llama.py has {', '.join(SCALINGS)} only"
            )
        expected = {
            "model_type": (config.get("model_type"), "llama"),
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "attention_bias": (bool(config.get("attention_bias")), False),
            "mlp_bias": (bool(config.get("mlp_bias")), False),
        }
        for key, (value, known) in expected.items():
            if value != known:
                raise ConfigError(f"params.hf_config: {where}: {key} is {value}, and jobs/llama.py has {known} only")
        try:
            width, heads = config["hidden_size"], config["num_attention_heads"]
            sizes = cls(
                config["vocab_size"],
                config["num_hidden_layers"],
                width,
                heads,
                config.get("num_key_value_heads") or heads,
                config["intermediate_size"],
                float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
                config.get("rms_norm_eps", 1e-6),
                bool(config.get("tie_word_embeddings")),
                {"rope_type": kind, **{key: rope[key] for key in SCALINGS[kind]}} if SCALINGS[kind] else None,
            )
        except KeyError as error:
            raise ConfigError(f"params.hf_config: {where} has no {error}; it is to be a Llama's config.json") from None
        # The decoder's heads divide its width; some models have wider ones.
        if (config.get("head_dim") or width // heads) != width // heads:
            raise ConfigError(f"params.hf_config: {where}: head_dim is not hidden_size / num_attention_heads")
        return sizes

    def hugging_face(self, length: int) -> dict[str, Any]:
        """Return the content of a ``config.json`` with which transformers makes the same model.

        ``length`` is the longest sequence.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.hidden,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": length,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float32",
        }

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angles by which one place turns the pairs of a head. The shape is (head width / 2,)."""
        width = self.width // self.heads
        plain: Tensor = self.rope_theta ** -(torch.arange(0, width, 2, device=device) / width)
        if self.rope_scaling is None:
            return plain
        kept: Tensor | float = 0.0
        if self.rope_scaling["rope_type"] == "llama3":
            # Only pairs that turn slowly are scaled, others by a part (https://arxiv.org/abs/2407.21783).
            _, low, high, length = (self.rope_scaling[key] for key in SCALINGS["llama3"])
            kept = ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        scaled: Tensor = plain * (kept + (1 - kept) / self.rope_scaling["factor"])
        return scaled

    def flops_per_token(self, length: int) -> float:
        """Return the operations of a training step for each token of sequences of ``length``.

        Those of the matrix products, 6 for each weight, and of attention (PaLM, https://arxiv.org/abs/2204.02311,
        appendix B). What activation checkpointing computes again does not count.
        """
        kv_width = self.width // self.heads * self.kv_heads
        block = 2 * self.width * (self.width + kv_width) + 3 * self.width * self.hidden
        weights = self.layers * block + self.vocabulary * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * length


class Llama(nn.Module):
    """A decoder with its head."""

    #: How ranks may compute its layers together, see toolkit/plugins/model_parallel/tensor_plan.py.
    tensor_plan = (
        dict.fromkeys(["model.embed_tokens", "model.layers.*.self_attn.o_proj"], "rowwise")
        | dict.fromkeys([f"model.layers.*.self_attn.{each}_proj" for each in "qkv"], "colwise")
        | dict.fromkeys(["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"], "colwise")
        | {"model.layers.*.mlp.down_proj": "rowwise"}
        | dict.fromkeys(["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"], "sequence")
        | {"model.norm": "sequence", "lm_head": "gathered"}
    )

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.model = Decoder(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        # The branches of a block add up over the depth: their last layers begin smaller (Radford et al. 2019).
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * sizes.layers) if is_last else STD)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, length, vocabulary) of the token that follows each.

        ``inputs`` are tokens (n, length), or (n, length, 2): each token and its place in its document. No token sees
        another document than its own, and a place of 0 begins one.
        """
        return self.lm_head(self.model(inputs))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The decoder without its head."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(sizes.vocabulary, sizes.width)
        places = Places(sizes)
        self.layers = nn.ModuleList(DecoderBlock(sizes, places) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, sizes.norm_eps)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the last hidden states (n, length, width)."""
        hidden = self.embed_tokens(inputs)
        for layer in self.layers:
            # With the model's input, which has the places: stages of a pipeline hand on one tensor only.
            hidden = layer(hidden, inputs)
        return self.norm(hidden)  # type: ignore[no-any-return]


class TokenEmbedding(nn.Embedding):
    """An embedding that leaves out the places."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (n, length, width)."""
        return super().forward(inputs[..., 0] if inputs.ndim == 3 else inputs)


class DecoderBlock(nn.Module):
    """Attention to what came before, then a SwiGLU for each token by itself."""

    def __init__(self, sizes: LlamaSizes, places: Places) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, sizes.norm_eps)
        self.self_attn = Attention(sizes, places)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, sizes.norm_eps)
        self.mlp = SwiGLU(sizes.width, sizes.hidden)

    def forward(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return the hidden states (n, length, width) after this block; ``inputs`` are the model's."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), inputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention within documents, with rotary positions; groups of heads share keys and values."""

    def __init__(self, sizes: LlamaSizes, places: Places) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.width // sizes.heads
        self.places = places
        self.q_proj = nn.Linear(sizes.width, self.heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(sizes.width, self.kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(sizes.width, self.kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_width, sizes.width, bias=False)

    def forward(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return (n, length, width)."""
        cos, sin, mask = self.places.of(inputs)
        # By the width of a head: of a layer that ranks compute together some heads come out here.
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        # No kernel but the slowest takes both a mask and groups of heads: repeat what a group shares.
        group = self.heads // self.kv_heads
        if group > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Two layers with a gate."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (n, length, width)."""
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class Places:
    """What attention needs to know of the tokens' places. All blocks need the same, so a pass computes it once."""

    def __init__(self, sizes: LlamaSizes) -> None:
        self._sizes = sizes
        self._inputs: Tensor | None = None
        self._version = 0
        self._found: tuple[Tensor, Tensor, Tensor | None]

    def of(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cosines and sines of the angles, and a mask: which tokens see each other.

        Cosines and sines are (n or 1, 1, length, head width). The mask is (n, 1, length, length). It is None for tokens
        without places, of which each sees all before it.
        """
        if torch.compiler.is_compiling():  # a compiled or exported program must not depend on what is kept here
            return self._computed(inputs)
        # The backward pass of another micro-batch may come in between (activation checkpointing).
        version = 0 if inputs.is_inference() else inputs._version
        if self._inputs is not inputs or self._version != version:
            self._inputs, self._version, self._found = inputs, version, self._computed(inputs)
        return self._found

    def _computed(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        has_places = inputs.ndim == 3
        places = inputs[..., 1] if has_places else torch.arange(inputs.shape[1], device=inputs.device)[None]
        angles = places[..., None].float() * self._sizes.frequencies(inputs.device)
        angles = torch.cat([angles, angles], -1)[:, None]
        mask = None
        if has_places:
            documents = (places == 0).cumsum(1)
            mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        return angles.cos(), angles.sin(), mask


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by their angles, in fp32.

    ``heads`` are (n, heads, length, head width).
    """
    first, second = heads.chunk(2, -1)
    return (heads * cos + torch.cat([-second, first], -1) * sin).to(heads.dtype)
