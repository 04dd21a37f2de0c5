"""``config.params``, the job's own keys: the job's dataclass filled with them, and as single values.

The dataclass is read from its file without an import: fields, types, literal defaults and comments. So the login node
knows the keys of a job that imports torch, in milliseconds. Each dataclass found becomes one with the same fields, and
the rest of this package treats it like those of schema.py.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import lru_cache, reduce
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from toolkit import limits
from toolkit.base.errors import ConfigError, nearest
from toolkit.config.source import PythonSource
from toolkit.limits import container_of, item_hints, members

T = TypeVar("T")


def filled(kind: type[T], values: Mapping[str, Any], key: str = "params") -> T:
    """Return an object of the dataclass ``kind`` with the values of a config: ``filled(Params, config.params)``.

    Sections become the dataclasses that their fields are annotated with. Lists become tuples, and names members of an
    Enum, where the annotation says so. Missing values get their defaults. Raises ConfigError for a key that ``kind``
    does not have, and for a missing one without a default.
    """
    valid = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in valid:
            likeliest = nearest(f"{key}.{name}", [f"{key}.{other}" for other in valid])
            raise ConfigError(f"unknown key '{key}.{name}'; {likeliest}valid here: {', '.join(sorted(valid))}")
    for name, f in valid.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{key}.{name}: must be given, for {kind.__name__} has no default for it")
    hints = get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        arguments[name] = _as_declared(value, hints[name], f"{key}.{name}")
    return kind(**arguments)


def _as_declared(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if is_dataclass(hint):
            return filled(hint, value, key)  # type: ignore[arg-type]
        mapping = container_of(hint, dict, Mapping)
        return {name: _as_declared(item, get_args(mapping)[1], f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        listed = container_of(hint, list, tuple, Sequence)
        items = [_as_declared(*pair, key) for pair in zip(value, item_hints(listed, len(value)), strict=True)]
        return tuple(items) if get_origin(listed) is tuple else items
    for member in members(hint):
        if isinstance(member, type) and issubclass(member, Enum) and isinstance(value, str):
            return member[value]
    return value


def leaves(values: Mapping[str, Any], key: str = "params") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a section, by its full key: ``params.optimizer.lr``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{key}.{name}")
        else:
            yield f"{key}.{name}", value


_SCALARS = {kind.__name__: kind for kind in limits.SCALARS}
_LISTS = ("list", "typing.List", "typing.Sequence", "collections.abc.Sequence")
_TUPLES = ("tuple", "typing.Tuple")
_MAPPINGS = ("dict", "typing.Dict", "typing.Mapping", "collections.abc.Mapping")
_ENUMS = ("enum.Enum", "enum.StrEnum", "enum.IntEnum")
_MARKERS = ("dataclasses.KW_ONLY",)
_EMPTY: dict[str, Any] = {"list": [], "dict": {}, "tuple": ()}
_TYPES = (
    "int, float, bool, str, None, Literal[...], list[...], tuple[...] and dict[str, ...] of these, `X | None`, an Enum "
    "or a dataclass of this file"
)


@dataclass(frozen=True)
class Declared:
    """What the source says about a field. The ``metadata`` of the made field has it under ``declared``."""

    comment: str
    place: str  #: file and line
    default: Any  #: the plain default, MISSING where there is none; of a section what differs from its own defaults


def declared(f: Any) -> Declared:
    """Return what the source says about a made field."""
    found: Declared = f.metadata["declared"]
    return found


@lru_cache(maxsize=16)
def dataclass_in(source: PythonSource, name: str) -> type | None:
    """Return a dataclass with the fields of the class ``name`` of ``source``. None if that is no dataclass.

    Raises ConfigError, with the line, for a field whose type or default cannot be known without running the file.
    """
    node = source.classes.get(name)
    return _DataclassReader(source).made(node) if node is not None and is_decorated(source, node) else None


def is_decorated(source: PythonSource, node: ast.ClassDef) -> bool:
    """True if the class has the decorator ``@dataclass``."""
    return _decorator(source, node) is not None


def _decorator(source: PythonSource, node: ast.ClassDef) -> ast.expr | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if source.full_name(called) == "dataclasses.dataclass":
            return decorator
    return None


def defaults_of(schema: Any, required: Any, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the plain defaults of a made dataclass, ``required`` where there is none.

    ``given`` are values from the default of a field of this type: ``Sub(width=3)``.
    """
    found: dict[str, Any] = {}
    for f in fields(schema):
        hint, default = limits.hints_of(schema)[f.name], declared(f).default
        value = given.get(f.name, default)
        if is_dataclass(hint):
            found[f.name] = defaults_of(hint, required, {} if value is MISSING else value)
        else:
            found[f.name] = required if value is MISSING else deepcopy(value)
    return found


class _DataclassReader:
    """A reader of the dataclasses and enums of one file."""

    def __init__(self, source: PythonSource) -> None:
        self._source = source
        self._made: dict[str, type] = {}
        self._in_work: list[str] = []

    def made(self, node: ast.ClassDef) -> type:
        """Return the dataclass made from the class ``node``."""
        # Classes may use each other as types; one that leads back to itself has no end.
        if node.name in self._made:
            return self._made[node.name]
        if node.name in self._in_work:
            raise self._error(node, f"{node.name} contains itself, and a config has an end: take that field out")
        self._in_work.append(node.name)
        bases: list[type] = []
        for base in node.bases:
            above = self._source.classes.get(self._source.full_name(base))
            if above is not None and is_decorated(self._source, above):
                bases.append(self.made(above))
            elif self._source.full_name(base) != "object":
                raise self._error(
                    node,
                    f"{node.name} has the base {ast.unparse(base)}, which is no dataclass of this file: what fields it "
                    "gives cannot be known without importing it; write them here",
                )
        decorator = _decorator(self._source, node)
        # Fields are keyword-only with kw_only=True, or after a KW_ONLY marker.
        is_keyword = isinstance(decorator, ast.Call) and any(
            keyword.arg == "kw_only" and ast.unparse(keyword.value) == "True" for keyword in decorator.keywords
        )
        made_fields: dict[str, tuple[str, Any, Any]] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_keyword = is_keyword or self._source.full_name(statement.annotation) in _MARKERS
                made_field = self._field(statement, statement.target.id, is_keyword)
                if made_field is not None:
                    made_fields[statement.target.id] = made_field
        # make_dataclass merges and orders the fields as Python does, and refuses the same mistakes.
        try:
            made = make_dataclass(node.name, made_fields.values(), bases=tuple(bases))
        except TypeError as error:
            raise self._error(node, f"{node.name}: {error}: Python refuses that, too") from None
        self._in_work.remove(node.name)
        self._made[node.name] = made
        return made

    def _field(self, node: ast.AnnAssign, name: str, is_keyword: bool) -> tuple[str, Any, Any] | None:
        """Return the arguments for ``make_dataclass``; None for an annotation that is not a key."""
        origin = self._source.full_name(getattr(node.annotation, "value", node.annotation))
        if origin in (*_MARKERS, "typing.ClassVar"):
            return None
        hint = self._hint(node.annotation)
        # `field(...)` may hold the default, exclude the field, or make it keyword-only.
        arguments: dict[str | None, ast.expr] = {}
        value = node.value
        if isinstance(value, ast.Call) and self._source.full_name(value.func) == "dataclasses.field":
            arguments = {keyword.arg: keyword.value for keyword in value.keywords}
            value = arguments.get("default")
        if "init" in arguments and ast.unparse(arguments["init"]) == "False":
            return None
        is_keyword = is_keyword or ("kw_only" in arguments and ast.unparse(arguments["kw_only"]) == "True")
        default = MISSING
        if "default_factory" in arguments:
            default = self._of_factory(arguments["default_factory"], hint)
        elif value is not None:
            # Python refuses these defaults, too, but only when it runs the file.
            if isinstance(value, (ast.List, ast.Dict, ast.Set)) or is_dataclass(hint):
                factory = f"field(default_factory=lambda: {ast.unparse(value)})"
                raise self._error(value, f"{name}: all objects would share this default; write {factory}")
            default = self._default(value, hint)
        stands = Declared(self._source.comment_at(node), self._source.place(node), default)
        # A factory for every default: dataclasses refuse a list or a mapping as the default itself.
        factory_of: dict[str, Any] = {} if default is MISSING else {"default_factory": lambda: default}
        return name, hint, field(kw_only=is_keyword, metadata={"declared": stands}, **factory_of)

    # ------------------------------------------------------------------------------------------------------- defaults

    def _of_factory(self, node: ast.expr, hint: Any) -> Any:
        if isinstance(node, ast.Lambda):
            return self._default(node.body, hint)
        name = self._source.full_name(node)
        if name in _EMPTY and not is_dataclass(hint):
            return self._plain(node, _EMPTY[name], hint)
        return self._default(ast.copy_location(ast.Call(node, [], []), node), hint)

    def _default(self, node: ast.expr, hint: Any) -> Any:
        """Return the plain value of an expression; of ``Sub(width=3)`` its arguments by name."""
        if is_dataclass(hint):
            return self._section(node, hint)
        if isinstance(node, ast.Attribute) and self._words(self._source.full_name(node.value)):
            return self._plain(node, node.attr, hint)
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise self._error(
                node,
                f"the default {ast.unparse(node)} is no literal, and this file is read without being run: write the "
                "value itself, or null (X | None = None) and compute it in the job",
            ) from None
        return self._plain(node, value, hint)

    def _section(self, node: ast.expr, kind: Any) -> dict[str, Any]:
        # ``Sub(**values)`` does not say which keys it gives.
        if (
            not isinstance(node, ast.Call)
            or self._source.full_name(node.func) != kind.__name__
            or any(key.arg is None for key in node.keywords)
        ):
            raise self._error(node, f"the default {ast.unparse(node)} is no {kind.__name__}(...) with its keys")
        by_name = {f.name: limits.hints_of(kind)[f.name] for f in fields(kind)}
        # Positional arguments get their names, so that all defaults can be merged by key.
        given = dict(zip(by_name, node.args, strict=False))
        given |= {str(key.arg): key.value for key in node.keywords}
        if len(node.args) > len(by_name) or not given.keys() <= by_name.keys():
            raise self._error(node, f"{ast.unparse(node)}: {kind.__name__} has the keys {', '.join(by_name)}")
        return {key: self._default(value, by_name[key]) for key, value in given.items()}

    def _plain(self, node: ast.expr, value: Any, hint: Any) -> Any:
        try:
            return limits.plain(value, hint)
        except ValueError as error:
            why = f": it {error}" if str(error) else ""
            raise self._error(
                node, f"the default {ast.unparse(node)} does not fit its type {limits.text_of(hint)}{why}"
            ) from None

    # ---------------------------------------------------------------------------------------------------------- types

    def _hint(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and node.value is None:
            return NoneType
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                tree = ast.parse(node.value, mode="eval")
            except (SyntaxError, ValueError):
                raise self._unknown(node) from None
            # Errors name the line in the file, not the line in the text.
            for inner in ast.walk(tree):
                ast.copy_location(inner, node)
            return self._hint(tree.body)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._union(node, [node.left, node.right])
        # From here on the type is a name, or a name with [...].
        name = self._source.full_name(node)
        if name in _SCALARS:
            return _SCALARS[name]
        if name == "typing.Any":
            return Any
        if allowed := self._words(name):
            return Literal[allowed]
        if name in self._source.classes and is_decorated(self._source, self._source.classes[name]):
            return self.made(self._source.classes[name])
        if isinstance(node, ast.Subscript):
            return self._generic(node)
        if name in self._source.assigned and name not in self._in_work:  # such as Size = int | None
            self._in_work.append(name)
            hint = self._hint(self._source.assigned[name])
            self._in_work.remove(name)
            return hint
        raise self._unknown(node)

    def _generic(self, node: ast.Subscript) -> Any:
        name = self._source.full_name(node.value)
        args = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "typing.Literal":
            try:
                allowed = tuple(ast.literal_eval(arg) for arg in args)
            except ValueError:
                raise self._unknown(node) from None
            return Literal[allowed]
        if name == "typing.Optional":
            return self._union(node, [*args, ast.copy_location(ast.Constant(None), node)])
        if name == "typing.Union":
            return self._union(node, args)
        if name in _LISTS and len(args) == 1:
            return list[self._item(args[0])]  # type: ignore[misc]
        if name in _MAPPINGS and len(args) == 2 and self._source.full_name(args[0]) == "str":
            return dict[str, self._item(args[1])]  # type: ignore[misc]
        if name in _TUPLES:
            # tuple[int, ...] takes any number of items.
            is_open = len(args) == 2 and isinstance(args[1], ast.Constant) and args[1].value is ...
            items = [self._item(arg) for arg in (args[:1] if is_open else args)]
            return tuple[(*items, ...)] if is_open else tuple[tuple(items)]  # type: ignore[misc, valid-type]
        raise self._unknown(node)

    def _item(self, node: ast.expr) -> Any:
        """Return the type of an item of a list, tuple, mapping or union. It must not be a dataclass."""
        hint = self._hint(node)
        if is_dataclass(hint):
            raise self._error(
                node, f"{ast.unparse(node)}: a dataclass is a section of its own, not in a list or with |"
            )
        return hint

    def _union(self, node: ast.expr, parts: list[ast.expr]) -> Any:
        return reduce(operator.or_, map(self._item, parts))

    def _words(self, name: str) -> tuple[str, ...]:
        """Return the names of an enum of this file; empty for anything else."""
        node = self._source.classes.get(name)
        if node is None or not any(self._source.full_name(base) in _ENUMS for base in node.bases):
            return ()
        targets = [
            target for statement in node.body if isinstance(statement, ast.Assign) for target in statement.targets
        ]
        return tuple(t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))

    def _unknown(self, node: ast.expr) -> ConfigError:
        return self._error(node, f"the type {ast.unparse(node)} is none that a config can hold; there are {_TYPES}")

    def _error(self, node: ast.AST, text: str) -> ConfigError:
        return ConfigError(f"params: {self._source.place(node)}: {text}")
