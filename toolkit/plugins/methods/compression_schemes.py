"""Schemes that average a vector over the ranks and send less than the vector.

Each scheme makes the same calls in the same order on every rank, and gives every rank the same bits. It returns what it
has not sent, for the next step to add to its gradient (error feedback: Seide et al. 2014, 1-bit SGD; Karimireddy et al.
2019, https://arxiv.org/abs/1901.09847). So nothing of a gradient is lost, only delayed.

With ``strategy.compression_average`` a rank replaces its gradients by their moving average: momentum before the choice
of what to send. It is Deep Gradient Compression's momentum correction (with 1 less the decay as a factor, and without
forgetting the momentum of what was sent), and that of Fatkhullin et al. 2023 (https://arxiv.org/abs/2305.15155).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.base.process_limits import limits
from toolkit.config import StrategyConfig
from toolkit.ranks.collectives import broadcast_tensors, exchange_rows, gather_rows, start_sum
from toolkit.ranks.state import Entry, Replicated

#: The number of values that share a scale of 4 bytes.
BLOCK = 256


@dataclass(frozen=True)
class Piece:
    """A parameter whose gradient is compressed: values ``start`` to ``start + numel`` of the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    amount: float  #: its ratio (top-k) or rank (PowerSGD)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Return its shape as a matrix: the first dimension, and the product of the rest."""
        return self.shape[0], self.numel // self.shape[0]

    def of(self, vector: Tensor) -> Tensor:
        """Return its part of ``vector``, flat."""
        return vector[self.start : self.start + self.numel]


class MeteredCollectives:
    """The collectives that schemes use. It counts the bytes that this rank sends."""

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        self.sent_bytes = 0.0

    def start_sum(self, tensor: Tensor) -> dist.Work:
        self.sent_bytes += self.cost_of_sum(tensor)
        return start_sum(tensor)

    def cost_of_sum(self, tensor: Tensor) -> float:
        """Return the bytes that a rank sends for ``tensor`` in the cheapest all-reduce."""
        return 2 * (self.ranks - 1) / self.ranks * tensor.nbytes

    def all_gather(self, row: Tensor) -> Tensor:
        self.sent_bytes += (self.ranks - 1) * row.nbytes
        return gather_rows(row)

    def all_to_all(self, rows: Tensor) -> Tensor:
        self.sent_bytes += (self.ranks - 1) / self.ranks * rows.nbytes
        return exchange_rows(rows)


class Scheme(Protocol):
    """One way to compress. Vectors are flat, in fp32, of one length on all ranks."""

    #: The vector's length must be a multiple of this.
    multiple: int

    #: True if values that were not sent are added to the next step's gradient.
    feeds_back: bool

    def average(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over the ranks, approximately. Leave in ``values`` what was not sent.

        The mean of what stays is the mean of ``values`` less the result, up to the rounding of fp32. A value that is
        not finite, on any rank, makes the result not finite.
        """

    def state(self) -> dict[str, Entry]:
        """Return what a resume needs, live."""


class Codec(Protocol):
    """Encodes blocks of fp32 (n, BLOCK) and decodes them. Codes have their shape; scales, if any, are (n, 1)."""

    dtype: torch.dtype
    has_scales: bool

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor: ...


class Bf16:
    """Half the bytes, with 8 bits of precision."""

    dtype = torch.bfloat16
    has_scales = False

    def encode(self, blocks: Tensor) -> tuple[Tensor, None]:
        return blocks.to(torch.bfloat16), None

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float()


class Fp16:
    """Half the bytes, with 11 bits of precision. Scales are powers of two, so no gradient is too small or too large."""

    dtype = torch.float16
    has_scales = True

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Scale each block so that its largest value lies below 2**15; fp16 ends at 65,504."""
        largest = blocks.abs().amax(-1, keepdim=True)
        power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(min=-100) - 15)
        # A block that is not finite gets such a scale, and decodes to NaN.
        scales = torch.where(largest.isfinite(), power, largest)
        return (blocks / scales).to(torch.float16), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float().mul_(scales)


class Int8:
    """A quarter of the bytes. Each value becomes the nearest of 255 levels, from minus to plus its block's largest."""

    dtype = torch.int8
    has_scales = True

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return (blocks / scales).round_().to(torch.int8), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float().mul_(scales)


#: The number of blocks worked on at a time, by kind of device. On the CPU they stay in a processor's cache from one
#: operation to the next. On a GPU each operation costs microseconds, so there are few of them, on 64 MiB.
ON_CPU_AT_ONCE = 512


class BlockQuantization:
    """Fewer bits for each value, in two phases: sums of int8 overflow, and those of half precision round at every rank.

    Each rank gets its part of the vector from all others, adds in fp32, and sends the mean, with fewer bits again, to
    all. So with W ranks it sends 2 (W-1)/W times the small vector, as a plain all-reduce does with the whole vector.
    """

    def __init__(self, codec: Codec, wire: MeteredCollectives, *, feeds_back: bool, kind: str = "cpu") -> None:
        """Cut the work into pieces for this ``kind`` of device. The bits do not depend on it."""
        self.feeds_back = feeds_back
        self.multiple = BLOCK * wire.ranks
        self._codec = codec
        self._wire = wire
        self._at_once = ON_CPU_AT_ONCE if kind == "cpu" else limits().compressed_at_once
        self._rank_by_rank = kind == "cpu"

    def average(self, values: Tensor) -> Tensor:
        parts = values.view(self._wire.ranks, -1, BLOCK)
        message = self._message(parts)
        # Phase 1: encode the part of each rank. What the codes do not hold stays in ``values``.
        for blocks, place in self._chunks(parts, message):
            blocks -= self._encode(blocks, place)
        again = self._again(self._wire.all_to_all(message), parts[self._wire.rank])
        # Phase 2: every rank gets the means of all parts, encoded, and decodes them alike.
        mean = torch.empty_like(parts)
        for blocks, (codes, scales) in self._chunks(mean, self._wire.all_gather(again)):
            blocks.copy_(self._codec.decode(codes, scales))
        return mean.view(-1)

    def _again(self, received: Tensor, own: Tensor) -> Tensor:
        """Return the mean of what all ranks sent for our part, added up in the order of the ranks, encoded.

        This second rounding changes the sum for all ranks. This rank keeps the whole difference, in ``own``.
        """
        message = self._message(own)
        theirs = [self._chunks(own, row) for row in received]
        for (blocks, place), *arrived in zip(self._chunks(own, message), *theirs, strict=True):
            mean = torch.zeros_like(blocks)
            for _, (codes, scales) in arrived:
                mean += self._codec.decode(codes, scales)
            mean /= self._wire.ranks
            # Times the number of ranks: what stays counts as a mean over the ranks, and only this rank keeps the
            # difference.
            blocks += (mean - self._encode(mean, place)) * self._wire.ranks
        return message

    def _message(self, parts: Tensor) -> Tensor:
        """Return memory for ``parts`` (..., n, BLOCK), encoded, as bytes (..., m)."""
        *ranks, count, _ = parts.shape
        per_block = BLOCK * self._codec.dtype.itemsize + 4 * self._codec.has_scales
        return torch.empty(*ranks, count * per_block, dtype=torch.uint8, device=parts.device)

    def _chunks(self, parts: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Yield pieces of ``parts`` (..., n, BLOCK), each with its codes and scales, live in ``rows`` (..., m)."""
        if parts.ndim > 2 and self._rank_by_rank:
            for part, row in zip(parts, rows, strict=True):
                yield from self._chunks(part, row)
            return
        *ranks, count, _ = parts.shape
        end = count * BLOCK * self._codec.dtype.itemsize
        codes = rows[..., :end].view(self._codec.dtype).view_as(parts)
        scales = rows[..., end:].view(torch.float32).unsqueeze(-1)
        step = max(1, self._at_once // math.prod(ranks))
        for start in range(0, count, step):
            here = slice(start, start + step)
            yield parts[..., here, :], (codes[..., here, :], scales[..., here, :])

    def _encode(self, blocks: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
        """Encode ``blocks`` into ``place``; return what will be decoded from it."""
        codes, scales = self._codec.encode(blocks)
        place[0].copy_(codes)
        if scales is not None:
            place[1].copy_(scales)
        return self._codec.decode(*place)

    def state(self) -> dict[str, Entry]:
        return {}


class TopK:
    """The largest values of each parameter, exactly. ``amount`` is the part that is sent.

    From Deep Gradient Compression (Lin et al. 2018, https://arxiv.org/abs/1712.01887). A rank sends its choice to all
    others, W-1 times, so it pays off with few ranks.
    """

    multiple = 1
    feeds_back = True

    def __init__(self, pieces: Sequence[Piece], wire: MeteredCollectives) -> None:
        self._pieces = pieces
        self._wire = wire

    def average(self, values: Tensor) -> Tensor:
        largest = []
        for piece in self._pieces:
            count = max(1, math.ceil(piece.amount * piece.numel))
            largest.append(piece.of(values).abs().topk(count, sorted=False).indices + piece.start)
        places = torch.cat(largest)
        chosen = values[places]
        # Places are sent as int32, and values are viewed as int32, so that one message holds both.
        message = torch.stack([chosen.view(torch.int32), places.to(torch.int32)])
        values[places] = 0.0
        total = torch.zeros_like(values)
        for theirs, where in self._wire.all_gather(
            message
        ):  # each place occurs once a rank: the order of sums is fixed
            total.index_add_(0, where, theirs.view(torch.float32))
        return total / self._wire.ranks

    def state(self) -> dict[str, Entry]:
        return {}


class PowerSgd:
    """Each parameter's gradient of n x m as the product of n x r and r x m, with r its ``amount``.

    One step of a power iteration, which starts where the last one ended (Vogels et al. 2019,
    https://arxiv.org/abs/1905.13727). It takes two all-reduces, however many parameters there are.
    """

    multiple = 1
    feeds_back = True

    def __init__(self, pieces: Sequence[Piece], wire: MeteredCollectives, device: torch.device) -> None:
        self._pieces = pieces
        self._wire = wire
        draw = torch.Generator().manual_seed(0)
        self._right = []
        for piece in pieces:
            right = torch.randn(piece.sides[1], int(piece.amount), generator=draw)
            self._right.append(right.to(device))
        broadcast_tensors(self._right, source=0)  # other processors may draw other bits

    def average(self, values: Tensor) -> Tensor:
        # One power iteration: left = M right, orthogonalized; right = M^T left; the approximation is left right^T.
        matrices = [piece.of(values).view(piece.sides) for piece in self._pieces]
        left = self._sum([matrix @ right for matrix, right in zip(matrices, self._right, strict=True)])
        left = _orthogonal(left)  # of the sum: its scale does not matter
        own = [(side.t() @ matrix).t() for matrix, side in zip(matrices, left, strict=True)]
        # Subtract this rank's own approximation; what is left stays in ``values``.
        for matrix, side, right in zip(matrices, left, own, strict=True):
            matrix.addmm_(side, right.t(), alpha=-1.0)
        total = torch._foreach_div(self._sum(own), self._wire.ranks)
        # The next step starts from these. If one is not finite the old ones stay: no later step would get rid of it.
        good = torch.stack([part.sum() for part in total]).isfinite().all()
        for kept, new in zip(self._right, total, strict=True):
            torch.where(good, new, kept, out=kept)
        mean = torch.empty_like(values)
        for piece, side, right in zip(self._pieces, left, total, strict=True):
            torch.mm(side, right.t(), out=piece.of(mean).view(piece.sides))
        return mean

    def _sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of ``parts`` over the ranks, in one message."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._wire.start_sum(flat).wait()
        sums = torch.split(flat, [part.numel() for part in parts])
        return [total.view(part.shape) for total, part in zip(sums, parts, strict=True)]

    def state(self) -> dict[str, Entry]:
        """Return ``powersgd/<parameter>``: the second factor (m, r), equal on all ranks."""
        named = zip(self._pieces, self._right, strict=True)
        return {f"powersgd/{piece.name}": Replicated(right) for piece, right in named}


def _orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return an orthonormal basis of the columns of each matrix. Equal shapes share a call, and have the same bits."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in by_shape.values():
        bases = torch.linalg.qr(torch.stack([matrices[number] for number in numbers])).Q
        found |= zip(numbers, bases, strict=True)
    return [found[number] for number in range(len(matrices))]


def build_scheme(kind: str, pieces: Sequence[Piece], wire: MeteredCollectives, device: torch.device) -> Scheme:
    """Return the scheme that ``strategy.compression`` names."""
    match kind:
        case "fp16":
            return BlockQuantization(Fp16(), wire, feeds_back=False, kind=device.type)
        case "bf16":
            return BlockQuantization(Bf16(), wire, feeds_back=False, kind=device.type)
        case "int8":
            return BlockQuantization(Int8(), wire, feeds_back=True, kind=device.type)
        case "topk":
            return TopK(pieces, wire)
        case "powersgd":
            return PowerSgd(pieces, wire, device)
    raise ConfigError(f"strategy.compression: {kind} has no scheme")


def amount_for(config: StrategyConfig, shape: Sequence[int], said: float | str | None) -> float | None:
    """Return the ratio or rank for a parameter of ``shape``. None: it is sent uncompressed.

    ``said`` is the value that ``compression_layers`` has for it. Biases and norms are few and count much. So tensors of
    less than two dimensions are compressed with fp16 and bf16 only. A matrix that is no larger than its two factors is
    not compressed either.
    """
    kind = config.compression
    if said == "none" or (len(shape) < 2 and kind not in ("fp16", "bf16")) or not math.prod(shape):
        return None
    default: Mapping[str, float] = {"topk": config.compression_ratio, "powersgd": config.compression_rank}
    amount = default.get(kind, 1.0) if said is None else float(said)
    if kind != "powersgd":
        return amount
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(int(amount), rows, columns)
    return rank if rank * (rows + columns) < rows * columns else None
