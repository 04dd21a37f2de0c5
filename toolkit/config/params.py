"""``config.params``, the job's own keys: the job's dataclass filled with them, and as single values.

The dataclass is cut out of its file and run alone. So the login node knows the keys of a job that imports torch, in
milliseconds. Each dataclass found becomes one with the same fields, plain types and the comments of the source, and the
rest of this package treats it like those of schema.py.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import lru_cache, reduce
from types import MappingProxyType, ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from toolkit import constraints
from toolkit.base.errors import ConfigError, did_you_mean
from toolkit.config.source import PythonSource
from toolkit.constraints import container_of, item_hints, members

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
            likeliest = did_you_mean(f"{key}.{name}", [f"{key}.{other}" for other in valid])
            raise ConfigError(f"{key}.{name}: unknown key; {likeliest}valid here: {', '.join(sorted(valid))}")
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


_IMPORTS = (ast.Import, ast.ImportFrom)
_TYPES = (
    "int, float, bool, str, None, Literal[...], list[...], tuple[...] and dict[str, ...] of these, `X | None`, an Enum "
    "or a dataclass of this file"
)


@dataclass(frozen=True)
class Declared:
    """What the source says about a field. The ``metadata`` of the made field has it under ``declared``."""

    comment: str
    place: str  #: file and line
    default: Any  #: the plain default, MISSING where there is none; of a section the values by key


def declared(f: Any) -> Declared:
    """Return what the source says about a made field."""
    found: Declared = f.metadata["declared"]
    return found


@lru_cache(maxsize=16)
def dataclass_in(source: PythonSource, name: str) -> type | None:
    """Return a dataclass with the fields of the class ``name`` of ``source``. None if that is no dataclass.

    Raises ConfigError, with the line, for a field whose type or default no config can hold, or that needs more of the
    file than its constants, enums and dataclasses.
    """
    node = source.classes.get(name)
    return _DataclassReader(source, node).read() if node is not None and _is_dataclass(source, node) else None


def _is_dataclass(source: PythonSource, node: ast.ClassDef) -> bool:
    return any(_is_decorator(source, each) for each in node.decorator_list)


def _is_decorator(source: PythonSource, node: ast.expr) -> bool:
    return source.full_name(node.func if isinstance(node, ast.Call) else node) == "dataclasses.dataclass"


def defaults_of(schema: Any, required: Any, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the plain defaults of a made dataclass, ``required`` where there is none.

    ``given`` are values from the default of a field of this type: ``Sub(width=3)``.
    """
    found: dict[str, Any] = {}
    for f in fields(schema):
        hint, default = constraints.hints_of(schema)[f.name], declared(f).default
        value = given.get(f.name, default)
        if is_dataclass(hint):
            found[f.name] = defaults_of(hint, required, {} if value is MISSING else value)
        else:
            found[f.name] = required if value is MISSING else deepcopy(value)
    return found


class _DataclassReader:
    """Runs a dataclass of a file with the constants, enums and dataclasses that it uses, and nothing else of the file.

    Of what the file imports only the standard library is there: the rest may take seconds.
    """

    def __init__(self, source: PythonSource, node: ast.ClassDef) -> None:
        self._source, self._node = source, node
        self._module = ModuleType(f"the dataclasses of {source.path}")
        self._names = self._module.__dict__
        self._made: dict[str, type] = {}
        self._in_work: list[str] = []

    def read(self) -> type:
        """Return the dataclass with plain types and defaults."""
        # The statements that the class uses, itself included: imports first, else in the order of the file.
        found: dict[str, ast.stmt] = {self._node.name: self._bare(self._node)}
        queue: list[ast.AST] = [*found.values()]
        for statement in queue:
            for node in ast.walk(statement):
                if isinstance(node, ast.AnnAssign):
                    queue += _types_in_texts(node.annotation)
                if isinstance(node, ast.Name) and node.id not in found and (used := self._definition(node.id)):
                    found[node.id] = used
                    queue.append(used)
        needed = sorted(found.values(), key=lambda each: (not isinstance(each, _IMPORTS), each.lineno))
        # Annotations stay texts until they are asked for: classes may use each other as types in any order.
        flags = annotations.compiler_flag
        module = ast.fix_missing_locations(ast.Module(needed, []))
        code = compile(module, str(self._source.path), "exec", flags, dont_inherit=True)
        sys.modules[self._module.__name__] = self._module  # dataclasses look their types up there
        try:
            self._run(lambda: exec(code, self._names), self._node)
        finally:
            del sys.modules[self._module.__name__]
        return self._plain_class(self._names[self._node.name])

    def _run(self, action: Callable[[], T], node: ast.stmt) -> T:
        """Return what code of the file returns. Raises ConfigError with its line, else with that of ``node``."""
        try:
            return action()
        except Exception as error:
            path = str(self._source.path)
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            if isinstance(error, NameError):
                why = (
                    f"needs {error.name}, and only the constants, enums and dataclasses of this file are read: write "
                    "the value itself, or null (X | None = None) and compute it in the job"
                )
            else:
                why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"params: {path}, line {lines[-1] if lines else node.lineno}: {why}") from None

    def _definition(self, name: str) -> ast.stmt | None:
        """Return the statement that defines ``name``, if it is one that may be run."""
        source = self._source
        if (node := source.classes.get(name)) is not None:
            is_enum = any(source.full_name(base).startswith("enum.") for base in node.bases)
            return self._bare(node) if is_enum or _is_dataclass(source, node) else None
        for statement in source.nodes:
            if isinstance(statement, _IMPORTS):
                for alias in statement.names:
                    module = alias.name if isinstance(statement, ast.Import) else statement.module or ""
                    is_standard = module.partition(".")[0] in sys.stdlib_module_names
                    if (alias.asname or alias.name.partition(".")[0]) == name and is_standard:
                        alone = copy(statement)
                        alone.names = [alias]
                        return alone
        return source.constants.get(name)

    def _bare(self, node: ast.ClassDef) -> ast.ClassDef:
        """Return the class with its values alone: methods and other decorators may need what is not there."""
        decorators = [each for each in node.decorator_list if _is_decorator(self._source, each)]
        if decorators:
            body = [self._bare_field(each) for each in node.body if self._declares_field(each)]
            used = {name.id for each in body for name in ast.walk(each) if isinstance(name, ast.Name)}
            constants = [each for each in node.body if isinstance(each, ast.Assign)]
            body[:0] = [each for each in constants if not used.isdisjoint(map(ast.unparse, each.targets))]
        else:
            body = [self._bare_member(each) for each in node.body if isinstance(each, ast.Assign)]
        bare = ast.ClassDef(node.name, node.bases, node.keywords, body or [ast.Pass()], decorators)
        return ast.copy_location(bare, node)

    def _bare_field(self, node: ast.stmt) -> ast.stmt:
        """Return the declaration of a field without its metadata."""
        node = deepcopy(node)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and self._source.full_name(value.func) == "dataclasses.field":
            value.keywords = [each for each in value.keywords if each.arg != "metadata"]
        return node

    def _bare_member(self, node: ast.Assign) -> ast.stmt:
        """Return a member of an Enum. Configs have its name: a value that needs more of the file is left out."""
        names = [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
        if all(hasattr(builtins, name) or self._definition(name) for name in names):
            return node
        return ast.copy_location(ast.Assign(node.targets, ast.Constant(ast.unparse(node.targets[0]))), node)

    def _declares_field(self, node: ast.stmt) -> bool:
        if not isinstance(node, ast.AnnAssign):
            return False
        kind = self._source.full_name(getattr(node.annotation, "value", node.annotation))
        if kind == "dataclasses.InitVar":
            raise self._unknown(node)
        return kind != "typing.ClassVar"

    def _plain_class(self, kind: Any) -> type:
        """Return a dataclass like ``kind`` of the file, with plain types and defaults, and what the source says."""
        node = self._source.classes[kind.__name__]
        if node.name in self._in_work:  # a field that leads back to its own class has no end
            raise self._error(node, f"{node.name} contains itself, and a config has an end: take that field out")
        if node.name not in self._made:
            self._in_work.append(node.name)
            made_fields = [(f.name, *self._field(kind, f)) for f in fields(kind) if f.init]
            self._made[node.name] = make_dataclass(node.name, made_fields, kw_only=True)
            self._in_work.remove(node.name)
        return self._made[node.name]

    def _field(self, kind: Any, f: Any) -> tuple[Any, Any]:
        """Return type and field for ``make_dataclass``."""
        node = self._statement_of(kind, f.name)
        # One by one, for an error to name the line.
        holder = type("Holder", (), {"__annotations__": {f.name: f.type}})
        try:
            hint = self._plain_type(get_type_hints(holder, self._names)[f.name], node)
        except (NameError, TypeError, AttributeError, SyntaxError, IndexError):  # also of a bare `List`
            raise self._unknown(node) from None
        value = f.default
        if f.default_factory is not MISSING:
            value = self._run(f.default_factory, node)
        default = MISSING if value is MISSING else self._plain_value(value, hint, node)
        stands = Declared(self._source.comment_at(node), self._source.place(node), default)
        # A factory for every default: dataclasses refuse a list or a mapping as the default itself.
        factory_of: dict[str, Any] = {} if default is MISSING else {"default_factory": lambda: default}
        return hint, field(metadata={"declared": stands}, **factory_of)

    def _statement_of(self, kind: Any, name: str) -> ast.AnnAssign:
        """Return where a dataclass, or one that it derives from, declares a field."""
        for above in kind.__mro__:
            for node in self._source.classes[above.__name__].body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                    return node
        raise AssertionError(name)

    def _plain_value(self, value: Any, hint: Any, node: ast.AnnAssign) -> Any:
        """Return a default as a config has it; of a dataclass its values by key."""
        if is_dataclass(hint) and type(value).__name__ == hint.__name__:  # type: ignore[union-attr]
            hints: dict[str, Any] = get_type_hints(hint)
            return {name: self._plain_value(getattr(value, name), hints[name], node) for name in hints}
        try:
            return constraints.plain(_without_members(value), hint)
        except ValueError as error:
            why = f": it {error}" if str(error) else ""
            given = ast.unparse(node.value) if node.value else ""
            raise self._error(
                node, f"the default {given} does not fit its type {constraints.text_of(hint)}{why}"
            ) from None

    def _plain_type(self, hint: Any, node: ast.AnnAssign) -> Any:
        """Return a type as configs have it: an Enum is one of its names, a sequence a list."""
        origin, args = get_origin(hint), get_args(hint)
        if hint in (*constraints.SCALARS, NoneType, Any):
            return hint
        if origin is Literal and all(isinstance(word, (*constraints.SCALARS, NoneType)) for word in args):
            return hint
        if isinstance(hint, type) and issubclass(hint, Enum):
            return Literal[tuple(hint.__members__)]
        if is_dataclass(hint) and self._names.get(hint.__name__) is hint:  # type: ignore[union-attr]
            return self._plain_class(hint)
        items = [each if each is ... else self._plain_type(each, node) for each in args]
        if any(is_dataclass(each) for each in items):
            text = ast.unparse(node.annotation)
            raise self._error(node, f"{text}: a dataclass is a section of its own, not in a list or with |")
        if origin in (Union, UnionType):
            return reduce(operator.or_, items)
        if origin is tuple:
            return tuple[tuple(items)]  # type: ignore[misc]
        if origin in (list, collections.abc.Sequence):
            return list[items[0]]  # type: ignore[valid-type]
        if origin in (dict, collections.abc.Mapping) and args[0] is str:
            return dict[str, items[1]]  # type: ignore[valid-type]
        raise self._unknown(node)

    def _unknown(self, node: ast.AnnAssign) -> ConfigError:
        return self._error(node, f"a config cannot hold the type {ast.unparse(node.annotation)}; there are {_TYPES}")

    def _error(self, node: ast.AST, text: str) -> ConfigError:
        return ConfigError(f"params: {self._source.place(node)}: {text}")


def _types_in_texts(annotation: ast.expr) -> Iterator[ast.AST]:
    """Yield the types that an annotation has as texts, but not the words of a Literal."""
    subscripts = [node for node in ast.walk(annotation) if isinstance(node, ast.Subscript)]
    words = {word for node in subscripts if "Literal" in ast.unparse(node.value) for word in ast.walk(node.slice)}
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in words:
            with suppress(SyntaxError, ValueError):
                kind = ast.parse(node.value, mode="eval").body
                yield kind
                yield from _types_in_texts(kind)


def _without_members(value: Any) -> Any:
    """Return the value with the names of enums' members in their place."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_without_members, value))
    return {key: _without_members(each) for key, each in value.items()} if isinstance(value, dict) else value
