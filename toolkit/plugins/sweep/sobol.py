"""The Sobol sequence: points that fill a cube evenly, each prefix of them as well.

Direction numbers of S. Joe and F. Y. Kuo, new-joe-kuo-6.21201; the order is Gray's, as in `torch.quasirandom`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.base.errors import RequestError

_BITS = 30
#: Of each dimension after the first: degree and coefficients of its polynomial, and its first numbers.
_JOE_KUO = (
    (1, 0, (1,)), (2, 1, (1, 3)), (3, 1, (1, 3, 1)), (3, 2, (1, 1, 1)), (4, 1, (1, 1, 3, 3)), (4, 4, (1, 3, 5, 13)),
    (5, 2, (1, 1, 5, 5, 17)), (5, 4, (1, 1, 5, 5, 5)), (5, 7, (1, 1, 7, 11, 19)), (5, 11, (1, 1, 5, 1, 1)),
    (5, 13, (1, 1, 1, 3, 11)), (5, 14, (1, 3, 5, 5, 31)),
)  # fmt: skip


def sobol(dimensions: int) -> Iterator[Sequence[float]]:
    """Yield the points, without the first, which is all zeros. Raises RequestError for more than 13 dimensions."""
    most = len(_JOE_KUO) + 1
    if dimensions > most:
        raise RequestError(f"--sobol: {dimensions} keys are more than the {most} that it knows; use --random N")
    directions = [_directions(dimension) for dimension in range(dimensions)]
    at = [0] * dimensions
    for number in range(2**_BITS - 1):
        # Gray's order changes one bit at a time: that of the lowest zero of the point's number.
        bit = (~number & (number + 1)).bit_length() - 1
        at = [value ^ column[bit] for value, column in zip(at, directions, strict=True)]
        yield [value / 2**_BITS for value in at]


def _directions(dimension: int) -> list[int]:
    if dimension == 0:
        return [1 << (_BITS - 1 - bit) for bit in range(_BITS)]
    degree, coefficients, first = _JOE_KUO[dimension - 1]
    column = [number << (_BITS - 1 - bit) for bit, number in enumerate(first)]
    for bit in range(degree, _BITS):
        value = column[bit - degree] ^ (column[bit - degree] >> degree)
        for k in range(1, degree):
            if coefficients >> (degree - 1 - k) & 1:
                value ^= column[bit - k]
        column.append(value)
    return column
