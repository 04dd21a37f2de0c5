"""Walks nested data: dictionaries, lists, tuples, named tuples and dataclasses.

They may be nested in any order, with leaves of any kind. torch.utils._pytree knows no dataclasses that were not
registered, and torch's default_collate knows none at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: Path of the outermost value.
ROOT = "batch"


class NestingError(ValueError):
    """Two values are not nested alike, or a leaf cannot be split. The message says where."""


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return ``tree`` with ``function(leaf, *leaves of others at its place)`` for each leaf. Raises NestingError."""
    return _mapped(lambda _, *leaves: function(*leaves), ROOT, tree, *others)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return ``tree`` with each tensor replaced but ``batch_sizes`` of packed sequences, which stay on the CPU."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, PackedSequence):
            sizes = leaf.batch_sizes
            moved = (each if each is None or each is sizes else function(each) for each in leaf)
            return PackedSequence(*moved)  # type: ignore[arg-type]  # only indices may be None
        return list(leaf) if isinstance(leaf, _Texts) else leaf

    return map_leaves(mapped, _marked(tree, ROOT, None))


def map_with_path(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Map like :func:`map_leaves`, with the leaf's path (``batch['ids'][0]``) as first argument."""
    return _mapped(function, ROOT, tree, *others)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of ``tree``, in the order of its containers. Of packed sequences these are their tensors."""
    found = list[Any]()
    map_leaves(lambda leaf: found.extend(leaf if isinstance(leaf, PackedSequence) else [leaf]), tree)
    yield from found


def slice_samples(tree: Any, count: int, part: slice, *, is_stacked: bool = True) -> Any:
    """Return the samples ``part`` of a batch ``tree`` of ``count`` samples.

    Every tensor and array has ``count`` rows; so has a list of texts. With ``is_stacked`` false, a list or a tuple of
    ``count`` elements might hold one element for each sample, and is refused. Raises NestingError.
    """

    def cut(path: str, leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, np.ndarray, _Texts)):
            shape = (len(leaf),) if isinstance(leaf, _Texts) else tuple(leaf.shape)
            if shape[:1] == (count,):
                return leaf[part]
            raise NestingError(f"{path} has the shape {shape}, and the batch has {count} samples")
        raise NestingError(f"{path} is a {type(leaf).__name__}, which has no rows")

    return _mapped(cut, ROOT, _marked(tree, ROOT, None if is_stacked else count))


def repeat_samples(tree: Any) -> Any:
    """Return a batch ``tree`` with all of its samples twice."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.cat([leaf, leaf])
        if isinstance(leaf, np.ndarray):
            return np.concatenate([leaf, leaf])
        return leaf + leaf if isinstance(leaf, _Texts) else leaf

    return map_leaves(double, _marked(tree, ROOT, None))


class _Texts(list[Any]):
    """A list with a text, or another plain value, for each sample."""


def _marked(tree: Any, path: str, ambiguous: int | None) -> Any:
    # A list of plain values is one leaf with a row for each sample, not a node.
    if isinstance(tree, list) and tree and all(isinstance(each, (str, bytes, int, float, type(None))) for each in tree):
        return _Texts(tree)
    if isinstance(tree, (list, tuple)) and len(tree) == ambiguous and len(tree) > 1:
        raise NestingError(
            f"{path} is a {type(tree).__name__} of {len(tree)}, as many as there are samples: one element for each?"
        )
    return _children(tree, path, lambda inner, child, *_: _marked(child, inner, ambiguous)) if _is_node(tree) else tree


def _is_node(tree: Any) -> bool:
    # The rows of a packed sequence are not samples, and torch wants a part of it on the CPU.
    if isinstance(tree, (_Texts, PackedSequence)):
        return False
    return isinstance(tree, (Mapping, list, tuple)) or (is_dataclass(tree) and not isinstance(tree, type))


def _mapped(function: Callable[..., Any], path: str, tree: Any, *others: Any) -> Any:
    if not _is_node(tree):
        return function(path, tree, *others)
    return _children(tree, path, lambda inner, *trees: _mapped(function, inner, *trees), *others)


def _children(tree: Any, path: str, function: Callable[..., Any], *others: Any) -> Any:
    """Return ``tree`` with each child replaced by ``function(path, child, *children of others)``."""
    # All trees must agree before any child is visited.
    for other in others:
        if type(other) is not type(tree):
            raise NestingError(f"{path} is a {type(tree).__name__} in one sample, a {type(other).__name__} in another")
    if isinstance(tree, Mapping):
        for other in others:
            if differing := sorted(map(repr, tree.keys() ^ other.keys())):
                raise NestingError(f"{path} has {differing[0]} in one sample only")
        children = {}
        for key in tree:
            children[key] = function(f"{path}[{key!r}]", tree[key], *(other[key] for other in others))
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return children
        # Tokenizers of the Hugging Face kind have a type of their own.
        same = copy.copy(tree)
        same.update(children)
        return same
    if isinstance(tree, (list, tuple)):
        for other in others:
            if len(other) != len(tree):
                raise NestingError(f"{path} has {len(tree)} elements in one sample, {len(other)} in another")
        rows = enumerate(zip(tree, *others, strict=True))
        items = [function(f"{path}[{i}]", *row) for i, row in rows]
        # A named tuple takes its items as arguments, a list or tuple as one sequence.
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    names = [field.name for field in fields(tree) if field.init]
    trees = (tree, *others)
    values = {}
    for name in names:
        values[name] = function(f"{path}.{name}", *(getattr(each, name) for each in trees))
    return replace(tree, **values)
