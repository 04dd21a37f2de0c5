"""Finds the loops of a user's file that number their steps in a way that a resume breaks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from toolkit.base import logs
from toolkit.config.source import PythonSource, last_name, read_source

log = logs.get(__name__)


def warn_of_counting(path: Path) -> None:
    """Log a warning for each loop of the file that :func:`lint_loops` finds, once while the file stays the same."""
    _warn(read_source(path))


@lru_cache(maxsize=16)
def _warn(source: PythonSource) -> None:
    for warning in lint_loops(source):
        log.warning("%s", warning)


def lint_loops(source: PythonSource) -> Iterator[str]:
    """Yield a warning for each loop that counts its steps by itself, or reads another loader at the same time.

    After a resume within an epoch Python's own numbers and other loaders begin anew. The warning holds the line to
    write instead.
    """
    runs = {*_runs(source), "run"}
    yield from _beside(source, runs)
    yield from _own_counters(source, runs)
    for loop in ast.walk(source.tree):
        if not (isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call)):
            continue
        number, call = (*loop.target.elts, None)[0], loop.iter
        if source.full_name(call.func) != "enumerate" or not call.args or not isinstance(number, ast.Name):
            continue
        steps = _steps_in(call.args[0], runs)
        inside = (node for statement in loop.body for node in ast.walk(statement))
        names = (node for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        if steps is None or all(name.id != number.id for name in names):
            continue
        start = ", ".join(
            map(ast.unparse, call.args[1:] + [word.value for word in call.keywords if word.arg == "start"])
        )
        if steps is call.args[0]:
            instead = f"`for {ast.unparse(loop.target)[1:-1]} in {ast.unparse(steps)}.enumerate({start}):`"
        else:  # a progress bar, which asks the steps for their length
            has_total = any(word.arg == "total" for word in steps.keywords)
            place = ast.unparse(steps.func).removesuffix(".steps") + (".step" if has_total else ".batch")
            instead = f"`{number.id} = {place}{start and f' + {start}'}` in the loop"
        yield (
            f"{source.place(loop)}: after a resume enumerate counts from its start again, and {number.id!r} is then "
            f"another number than in an undisturbed run; write {instead}"
        )


def _beside(source: PythonSource, runs: set[str]) -> Iterator[str]:
    """Yield a warning for each zip, islice and next of ``run.steps(...)``."""
    assigned = [node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)]
    iterators = {last_name(node.targets[0]) for node in assigned if _steps_in(node.value, runs) is not None}
    for call in ast.walk(source.tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name, first = source.full_name(call.func), call.args[0]
        steps = next((each for each in (_steps_in(arg, runs) for arg in call.args) if each is not None), None)
        if name == "zip" and steps is not None and len(call.args) > 1:
            yield (
                f"{source.place(call)}: after a resume within an epoch zip begins the others at their start again, and "
                f"not {ast.unparse(steps)}; write `.enumerate()` for numbers, and give run.steps one iterable for "
                "several loaders"
            )
        elif name == "itertools.islice" and steps is not None:
            yield (
                f"{source.place(call)}: after a resume within an epoch islice counts from 0 again; write "
                f"`for number, batch in {ast.unparse(steps)}.enumerate():` and a `break`"
            )
        elif name == "next" and (steps is not None or (last_name(first) or None) in iterators):
            yield (
                f"{source.place(call)}: after a resume fewer batches are left than next() is called for; write "
                "`for batch in run.steps(...):`"
            )


def _own_counters(source: PythonSource, runs: set[str]) -> Iterator[str]:
    """Yield a warning for each number that a script counts up in ``run.steps(...)``, and goes by there."""
    handed = {
        ast.unparse(each)
        for call in source.nodes
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "resumable"
        for each in ast.walk(call)
        if isinstance(each, (ast.Name, ast.Attribute)) and not isinstance(source.parents[each], ast.Attribute)
    }
    for loop in source.nodes:
        if not isinstance(loop, ast.For) or _steps_in(loop.iter, runs) is None:
            continue
        inside = [node for statement in loop.body for node in ast.walk(statement)]
        goes_by = {name for node in inside for name in _goes_by(node)}
        for node in inside:
            if (
                isinstance(node, ast.AugAssign)
                and (name := ast.unparse(node.target)) in goes_by
                and not any(f"{name}.".startswith(f"{each}.") for each in handed)
                and _is_number(node.value)
                and _begins_anew(node.target, loop, source)
            ):
                yield (
                    f"{source.place(node)}: after a resume {name!r} counts from its start again; set it by "
                    "run.step or run.batch, or keep it in a dictionary that is handed over to run.resumable"
                )


def _begins_anew(counter: ast.Name | ast.Attribute | ast.Subscript, loop: ast.For, source: PythonSource) -> bool:
    """True if a function sets a counter to a number before the loop, and nowhere else; ``self.step``: the class."""
    scope: ast.AST = loop
    ends = (ast.FunctionDef, ast.Module) if isinstance(counter, ast.Name) else (ast.ClassDef, ast.Module)
    while not isinstance(scope, ends):
        scope = source.parents[scope]
    name = ast.unparse(counter)
    same = [node for node in ast.walk(scope) if isinstance(node, type(counter)) and ast.unparse(node) == name]
    sets = [source.parents[node] for node in same if isinstance(node.ctx, ast.Store) and node is not counter]
    shared = [each for node in source.nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for each in node.names]
    return name not in shared and [
        isinstance(each, ast.Assign) and _is_number(each.value) and each.lineno < loop.lineno for each in sets
    ] == [True]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _goes_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that decide what a loop does: in remainders, in comparisons, and as arguments.

    One that is compared with a literal number only waits for the program to warm up, as it should after each start.
    """
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        parts = [node.left]
    elif isinstance(node, ast.Compare) and not any(map(_is_number, node.comparators)):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        parts = [*node.args, *(word.value for word in node.keywords)]
    yield from (ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute)))


def _runs(source: PythonSource) -> Iterator[str]:
    """Yield the names that the file gives to what ``toolkit.start()`` opens."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.withitem):
            name, opened = node.optional_vars, node.context_expr
        elif isinstance(node, ast.Assign):
            name, opened = node.targets[0], node.value
        else:
            continue
        opener = source.full_name(opened.func) if isinstance(opened, ast.Call) else ""
        if opener in ("toolkit.start", "toolkit.current") and name is not None:
            yield last_name(name)


def _steps_in(node: ast.expr, runs: set[str]) -> ast.Call | None:
    """Return the call of ``run.steps`` that ``node`` is, or that it goes through, as a progress bar does."""
    while isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "steps":
            return node if last_name(func.value) in runs else None
        if not node.args:
            return None
        node = node.args[0]
    return None
