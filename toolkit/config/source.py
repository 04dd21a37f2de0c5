"""A user's Python file, read by its syntax tree. It is not imported: that may import torch, which takes seconds."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import ConfigError

#: Parts of a comment that are for tools.
_FOR_TOOLS = re.compile(r"#\s*(?:noqa|type: *ignore|pragma|fmt:|pylint:|pyright:).*")


def read_source(path: Path) -> PythonSource:
    """Return the source of a file, parsed once while its bytes stay the same.

    A sweep loads one config a point, all with the same job. Raises ConfigError.
    """
    try:
        return _parsed(path, fsio.read_bytes(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise ConfigError(f"job: {path}{line}: cannot be imported as Python: {why}") from None


def project_files(script: PythonSource, project: Path) -> tuple[PythonSource, ...]:
    """Return the script and the modules of ``project`` that it imports, also through each other.

    A module is looked for next to the script, in the project and in its ``src`` folder. One that cannot be read is left
    out, as is the toolkit itself.
    """
    found = {script.path.resolve(): script}
    queue = [script]
    for source in queue:
        for name in source.modules:
            for path in _files_of(name, source, (script.path.parent, project, project / "src")):
                if path.resolve() not in found:
                    with suppress(ConfigError):
                        queue.append(read_source(path))
                        found[path.resolve()] = queue[-1]
    return tuple(found.values())


def _files_of(name: str, source: PythonSource, folders: Iterable[Path]) -> list[Path]:
    """Return the file of a module and those of the packages above it; none where it is no module of these folders.

    Dots before ``name`` lead to the folder of ``source`` and those above it.
    """
    path = name.lstrip(".")
    if level := len(name) - len(path):
        folders = source.path.parents[level - 1 : level]
    parts = path.split(".") if path else []
    if parts[:1] == ["toolkit"]:
        return []
    for folder in folders:
        above = [folder.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts))]
        module = folder.joinpath(*parts)
        for file in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
            if parts and file.is_file():
                return [*filter(Path.is_file, above), file]
    return []


class PythonSource:
    """The syntax tree of a file, with the names that it imports and its comments."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self._content = path, content
        self.tree = ast.parse(content, filename=str(path))
        #: All nodes of the tree but ``Load()`` and the like, which are half of them and say nothing.
        self.nodes = [node for node in ast.walk(self.tree) if not isinstance(node, (ast.expr_context, ast.operator))]
        #: The classes at the top level, by name.
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def constants(self) -> dict[str, ast.stmt]:
        """The assignments at the top level, by name, of names that no other statement may change."""
        touched = Counter(name for node in self.tree.body for name in _touched(node))
        touched.update(name for node in self.nodes if isinstance(node, ast.Global) for name in node.names)
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                found |= {name: node for name in names if touched[name] == 1}
        return found

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the node above each."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def place(self, node: ast.AST) -> str:
        """Return the file and the line of ``node``."""
        return f"{self.path}, line {getattr(node, 'lineno', 1)}"

    def full_name(self, node: ast.expr) -> str:
        """Return a dotted name with what its first part is imported from: ``dataclasses.field`` for ``field``.

        Empty for an expression that is not a name.
        """
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self._imported.get(node.id, node.id), *reversed(parts)])

    @cached_property
    def _imported(self) -> dict[str, str]:
        """Return the full names of imported objects, by their local names."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                origin = f"{'.' * node.level}{node.module}." if node.module else "." * node.level
                names |= {alias.asname or alias.name: f"{origin}{alias.name}" for alias in node.names}
        return names

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Return the names of all that is imported; of ``from a import b`` both ``a`` and ``a.b``."""
        names: list[str] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                names.append(origin)
                names += [f"{origin}{'.' * bool(node.module)}{alias.name}" for alias in node.names]
        return tuple(dict.fromkeys(names))

    @cached_property
    def called(self) -> set[str]:
        """Return the full names of all that the file calls."""
        return {self.full_name(node.func) for node in self.nodes if isinstance(node, ast.Call)}

    def docstring(self, name: str) -> str:
        """Return the docstring of a class; empty without one."""
        return ast.get_docstring(self.classes[name]) or ""

    def is_imported(self, name: str) -> bool:
        """True if ``name`` is imported from elsewhere."""
        return name in self._imported

    def comments(self, name: str) -> dict[str, str]:
        """Return the comment of each field that the class ``name`` declares."""
        body = self.classes[name].body
        fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        return {ast.unparse(node.target): self.comment_at(node) for node in fields}

    def comment_at(self, node: ast.stmt) -> str:
        """Return the comment of a statement. It stands after it, or in lines before it that begin with ``#:``."""
        # A statement of several lines may have its comment after any of them, mostly after the last or the first.
        last = node.end_lineno or node.lineno
        lines = (last, *range(node.lineno, last))
        trailing = next((self._comments[line][1] for line in lines if line in self._comments), "")
        if trailing:
            return trailing
        above: list[str] = []
        line = node.lineno - 1
        while self._comments.get(line, ("", ""))[0] == "#:":
            above.insert(0, self._comments[line][1])
            line -= 1
        return " ".join(above)

    @cached_property
    def _comments(self) -> dict[int, tuple[str, str]]:
        """Return the mark and the text of each comment, by line. After code the mark is empty, else such as ``#:``."""
        found = {}
        for token in tokenize.tokenize(io.BytesIO(self._content).readline):
            if token.type == tokenize.COMMENT:
                mark = "" if token.line[: token.start[1]].strip() else token.string[:2]
                text = _FOR_TOOLS.sub("", token.string).lstrip("#:").strip()
                found[token.start[0]] = mark, text
        return found


_parsed = lru_cache(maxsize=128)(PythonSource)


def last_name(node: ast.expr | None) -> str:
    """Return ``b`` of ``a.b`` and of ``b``; "" of any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _touched(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement of the top level assigns, or may change: ``W[0] = 1``, ``W.append(1)``."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    if isinstance(node, ast.Expr):
        yield from (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))
        return
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        if isinstance(node, ast.Name):
            yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _touched(child)
