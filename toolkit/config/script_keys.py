"""Which keys of a config act on a job, and which options its script has of its own.

On a script fewer keys act than on a job of the toolkit's: what starts and watches its ranks, what ``toolkit.start()``
does for its loop, and what the script reads of ``run.config``. The last is found in the syntax trees of the script and
of the project's modules that it imports. Nothing is run, and where the trees do not tell, every key counts as read.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

from toolkit import registry
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, did_you_mean, listing
from toolkit.config.job_module import is_class, job_source, main_of
from toolkit.config.schema import CALLED_JOB, SCRIPT_JOB, all_keys
from toolkit.config.script_arguments import flag_of
from toolkit.config.source import PythonSource, last_name, project_files, read_source

#: Keys, and sections with a dot, of what starts and watches the ranks of any job.
OF_ANY_JOB = (
    *("name", "job", "restart_args", "cluster.", "retry.", "dist.", "data.stage", "secrets", "notify.", "trackers"),
)
#: Of the loop of a library, by an adapter.
OF_ADAPTERS = ("checkpoint.", "train.seed", "train.log_every")
#: Of ``toolkit.start()`` and its loop.
OF_LOOPS = (
    *(*OF_ADAPTERS, "train.max_steps", "train.on_nan", "train.deterministic"),
    *("train.float32_matmul", "train.cudnn_benchmark", "train.expandable_segments"),
)
#: Nothing tells which checkpoint of a loop is the best: it has no evaluation of ours.
OF_NO_LOOP = ("checkpoint.keep_best",)
_STARTS = ("toolkit.start", "toolkit.current")
#: The arguments of ``run.loader`` that default to keys of ``data``.
_OF_LOADER = ("global_batch_size", "workers")
_SECTIONS = {"", *(key.rpartition(".")[0] for key in all_keys())}
#: What is imported from these neither parses a command line nor reads a run's config. Anything else may.
_HARMLESS = {
    *(sys.stdlib_module_names - {"argparse", "getopt", "optparse"}),
    *("toolkit", "torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL"),
    *("tqdm", "einops", "torchmetrics", "tensorboard", "safetensors"),
}
#: Calls that run code which no import names.
_HIDING = {"__import__", "exec", "eval", "import_module", "exec_module", "run_path", "run_module"}
#: Variables that lead a script to the run's config without ``run.config``.
_WAYS_TO_CONFIG = re.compile("TOOLKIT_RUN_DIR|TOOLKIT_CONFIG")
#: Words of a command that may name a script, or a module after ``-m``.
_SCRIPT_WORDS = re.compile(r"""(-m\s+)?([^\s'"=;&|()<>]+)""")
#: Functions that make options of the arguments of the function that they are given.
_BY_SIGNATURE = ("fire.Fire", "typer.run", "tyro.cli")


@dataclass(frozen=True)
class Option:
    """An option of a script's own command line."""

    flag: str  #: with its dashes
    about: str = ""  #: default and help

    @property
    def name(self) -> str:
        """Return the name as ``args.NAME`` takes it."""
        return self.flag.lstrip("-")


@dataclass(frozen=True)
class KeysOfFiles:
    """The keys that act on a job as far as some of its files tell."""

    script: str = ""  #: its name
    by_toolkit: tuple[str, ...] = ("",)  #: the keys, and the beginnings of keys, that the toolkit itself reads
    read: frozenset[str] = frozenset()  #: the keys and sections that the files read; "" is the whole config
    is_main: bool = False  #: a ``main(config)`` that the toolkit calls
    options: tuple[Option, ...] = ()  #: the script's own, as far as the files tell
    flags: frozenset[str] = frozenset()  #: all flags of the options that the files declare by argparse
    refuses_others: bool = False  #: the script's argparse surely ends it at any other flag

    def has_effect(self, key: str) -> bool:
        return self.is_toolkit_key(key) or any(
            not each or f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in self.read
        )

    def is_toolkit_key(self, key: str) -> bool:
        return key.startswith(self.by_toolkit) and (key not in OF_NO_LOOP or self.by_toolkit == ("",))


class ActingKeys:
    """The keys that act on a job.

    The modules that its script imports, which may be hundreds, are read only where the script leaves a key undecided.
    """

    def __init__(
        self,
        of_script: KeysOfFiles = KeysOfFiles(),
        of_all: Callable[[], KeysOfFiles] = KeysOfFiles,
        *,
        takes_arguments: bool = False,
    ) -> None:
        """``takes_arguments``: the command's arguments are those of one script."""
        self._of_script, self._read_all, self._takes_arguments = of_script, of_all, takes_arguments

    @cached_property
    def _of_all(self) -> KeysOfFiles:
        return self._read_all()

    @property
    def script(self) -> str:
        """Return the script's name."""
        return self._of_script.script

    @property
    def options(self) -> tuple[Option, ...]:
        """Return the script's own options, as far as its files tell."""
        return self._of_all.options

    def has_effect(self, key: str) -> bool:
        """True if the value of ``key`` makes a difference to this job."""
        return self._of_script.has_effect(key) or self._of_all.has_effect(key)

    def is_toolkit_key(self, key: str) -> bool:
        """True if the toolkit itself reads ``key`` while this job runs."""
        return self._of_script.is_toolkit_key(key) or self._of_all.is_toolkit_key(key)

    def refusal_of_option(self, name: str) -> str | None:
        """Return why ``args.NAME`` is refused; None where the script takes it, or its options are not all known."""
        flag = flag_of(name)
        # argparse takes the beginning of a flag for the whole.
        if not self._takes_arguments or any(each.startswith(flag) for each in self._of_script.flags):
            return None
        found = self._of_all
        if not found.refuses_others or any(each.startswith(flag) for each in found.flags):
            return None
        names = sorted(each.lstrip("-") for each in found.flags)
        return (
            f"args.{name}: {self.script} has no option {flag}; {did_you_mean(name, names)}it takes {listing(names, 30)}"
        )

    def refusal(self, key: str, value: str = "...") -> str:
        """Return why ``key`` is refused, and what to write instead."""
        found = self._of_all
        if key in ("argv", "args"):
            return f"{key}: {self.script} reads no command line, so arguments would change nothing; leave them out"
        if likely := next((option for option in found.options if _alike(option.name, key.rpartition(".")[2])), None):
            how = f"for its own option {likely.flag} write args.{likely.name}={value}"
        elif found.options:
            how = f"its own options are {listing([f'args.{option.name}' for option in found.options])}"
        elif found.is_main:
            how = "read it from the config in its main, or leave it out"
        elif "args" in found.by_toolkit:
            how = "its own arguments come after `--`"
        elif OF_LOOPS[-1] in found.by_toolkit:
            how = f"read run.config.{key} there, or leave it out"
        else:
            how = "leave it out"
        return f"{key}: {self.script} does not read it, so it would change nothing; {how}"


def acting_keys(job: str, argv: Sequence[str], project: Path | None = None) -> ActingKeys:
    """Return the keys that act on a job, whose command is ``argv`` if it is one of `toolkit exec`.

    All act on a class derived from ``toolkit.Job``, and on what cannot be found or read.
    """
    folder, is_script = project or Path.cwd(), job == SCRIPT_JOB
    paths: list[Path] = []
    with suppress(ConfigError, OSError):
        if is_script:
            paths = [*_scripts_of(argv, folder)]
        elif job != CALLED_JOB and not is_class(job, folder):
            paths = [job_source(job, folder)]
        scripts = [*map(read_source, paths)]
        if scripts:
            places = (*(path.parent for path in paths), folder, folder / "src")

            def of_all() -> KeysOfFiles:
                gc.disable()  # it would search the growing trees of all files again and again, a third of the time
                try:
                    sources = dict.fromkeys(chain.from_iterable(project_files(script, folder) for script in scripts))
                    return _read_by(tuple(sources), _outside(sources, places), is_script)
                finally:
                    gc.enable()

            of_scripts = _read_by(tuple(scripts), _outside(scripts, places), is_script)
            # Words behind a shell are its own.
            is_command = not is_script or [folder / word for word in argv if word.endswith(".py")] == paths
            return ActingKeys(of_scripts, of_all, takes_arguments=is_command)
    if is_script and argv:
        unknown = KeysOfFiles(by_toolkit=(*OF_ANY_JOB, "args", "argv"), read=frozenset({""}))
        return ActingKeys(unknown, lambda: unknown)
    return ActingKeys()


def _scripts_of(argv: Sequence[str], folder: Path) -> Iterator[Path]:
    """Yield the Python files that a command names, also in the text of its shell and in a shell's script."""
    text = " ".join(argv)
    for word in argv:
        if word.endswith((".sh", ".bash")) and (folder / word).is_file():
            text += " " + fsio.read_text(folder / word, errors="replace")
    for dash_m, word in _SCRIPT_WORDS.findall(text):
        name = word.replace(".", "/") if dash_m else word.removesuffix(".py")
        endings = (".py", "/__main__.py") if dash_m else (".py",) * word.endswith(".py")
        yield from (folder / f"{name}{ending}" for ending in endings if (folder / f"{name}{ending}").is_file())


def _outside(sources: Iterable[PythonSource], places: Iterable[Path]) -> frozenset[str]:
    """Return the packages that files import from elsewhere: they may do what these files do not show."""
    imported = {name.partition(".")[0] for source in sources for name in source.modules}
    paths = ((name, str(place / name)) for name in imported - _HARMLESS for place in places)
    inside = {name for name, path in paths if os.path.isdir(path) or os.path.isfile(f"{path}.py")}  # noqa: PTH112, PTH113
    return frozenset(imported - inside - _HARMLESS)


@lru_cache(maxsize=16)
def _read_by(sources: tuple[PythonSource, ...], outside: frozenset[str], is_script: bool) -> KeysOfFiles:
    """Return the keys that act on these files, the first of which is the script; ``outside`` is :func:`_outside`'s."""
    called = set[str]().union(*(source.called for source in sources))
    by_toolkit: tuple[str, ...] = OF_ANY_JOB
    if any(name.startswith(f"{adapter}.") for adapter in registry.names("adapters").values() for name in called):
        by_toolkit += OF_ADAPTERS
    is_loop = not called.isdisjoint(_STARTS)
    if is_loop:
        by_toolkit += OF_LOOPS
    main = None if is_loop or is_script else main_of(sources[0])
    reader = _Reader(sources, outside, main)
    if main is not None or reader.may_parse_arguments():  # the arguments of a main(config) are refused elsewhere
        by_toolkit += ("args", "argv")
    if is_script:
        by_toolkit += ("argv",)
    read, options = frozenset(reader.read_keys()), tuple(_options(sources))
    return KeysOfFiles(sources[0].path.name, by_toolkit, read, main is not None, options, *_flags(sources))


class _Reader:
    """Finds what files read of a run's config, by expressions such as ``run.config.optim.lr``.

    A place in the config is a dotted key or section; "" is the whole config.
    """

    def __init__(self, sources: Sequence[PythonSource], outside: frozenset[str], main: ast.FunctionDef | None) -> None:
        self._sources, self._outside = sources, outside
        #: Places by the names and attributes that stand for them, in all files.
        self._aliases: dict[str, set[str]] = {}
        self._made: dict[str, list[tuple[ast.expr | None, PythonSource]]] = {}
        for source in sources:
            for node in source.nodes:
                if isinstance(node, ast.arg):
                    self._made.setdefault(node.arg, []).append((None, source))
                for name, value in _assigned(node):
                    self._made.setdefault(name, []).append((value, source))
        if main is not None and (takes := [*main.args.posonlyargs, *main.args.args]):
            self._aliases[takes[0].arg] = {""}

    def may_parse_arguments(self) -> bool:
        """True if anything in the files may look at the command line."""
        if self._outside:
            return True
        names = {getattr(node, "attr", getattr(node, "id", None)) for source in self._sources for node in source.nodes}
        return not names.isdisjoint({"argv", "orig_argv", *_HIDING})

    def read_keys(self) -> set[str]:
        """Return the places that the files read."""
        # First find names for the config and its sections: ``cfg = run.config``. One may be made of another.
        count = -1
        while count != (count := sum(map(len, self._aliases.values()))):
            for name, made in self._made.items():
                for value, source in made:
                    if value is not None and (places := self._places(value, source) & _SECTIONS):
                        self._aliases.setdefault(name, set()).update(places)
        return {place for source in self._sources for node in source.nodes for place in self._read_at(node, source)}

    def _read_at(self, node: ast.AST, source: PythonSource) -> set[str]:
        """Return the places that are read where ``node`` stands."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WAYS_TO_CONFIG.search(node.value):
            return {""}
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            return set()
        read = self._read_by_call(node, source) if isinstance(node, ast.Call) else set()
        if not (places := self._places(node, source)):
            return read
        parent = source.parents.get(node)
        # A part of a longer expression, and a name for a section, are no use yet.
        is_part = isinstance(parent, ast.Attribute) or (parent is not None and _got(parent)[0] is node)
        is_named = parent is not None and any(value is node for _, value in _assigned(parent))
        return read if is_part or (is_named and places <= _SECTIONS) else read | places

    def _read_by_call(self, call: ast.Call, source: PythonSource) -> set[str]:
        name = source.full_name(call.func)
        if name in ("toolkit.load_config", *_HIDING) or name.rpartition(".")[2] in _HIDING - {"eval", "exec"}:
            return {""}
        if name.partition(".")[0] in self._outside:  # a package that is not seen gets the run
            given = [*call.args, *(word.value for word in call.keywords)]
            return {""} if any(self._is_run(each) for each in given) else set()
        if not isinstance(call.func, ast.Attribute) or not self._may_be_run(call.func.value, source):
            return set()
        if call.func.attr == "params":
            return {"params"}
        if call.func.attr != "loader":
            return set()
        named = {word.arg: word.value for word in call.keywords}
        return {f"data.{key}" for key in _OF_LOADER if None in named or _is_none(named.get(key))}

    def _places(self, node: ast.AST, source: PythonSource) -> set[str]:
        """Return the places in the config that an expression may be."""
        if isinstance(node, ast.NamedExpr):
            return self._places(node.value, source)
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, set())
        value, attribute = (node.value, node.attr) if isinstance(node, ast.Attribute) else _got(node)
        if value is None:
            return set()
        above = self._places(value, source)
        found = {f"{place}.{attribute}".lstrip(".") for place in above}
        if attribute == "config" and not above and self._may_be_run(value, source):
            found.add("")
        return found | self._aliases.get(attribute, set())

    def _is_run(self, node: ast.expr) -> bool:
        """True for a name that is given to what ``toolkit.start()`` gives."""
        made = self._made.get(node.id, []) if isinstance(node, ast.Name) else []
        return any(isinstance(value, ast.Call) and source.full_name(value.func) in _STARTS for value, source in made)

    def _may_be_run(self, node: ast.expr, source: PythonSource) -> bool:
        """True unless an expression is surely not what ``toolkit.start()`` gives."""
        if isinstance(node, ast.Name):
            made = self._made.get(node.id, [])
            is_made_elsewhere = made and all(
                isinstance(value, ast.Call) and not self._may_be_run(value, of) for value, of in made
            )
            return node.id not in ("self", "cls") and not is_made_elsewhere and not self._is_library(node, source)
        if isinstance(node, ast.Call):
            return source.full_name(node.func) in _STARTS or not self._is_library(node.func, source)
        return not self._is_library(node, source)

    def _is_library(self, node: ast.expr, source: PythonSource) -> bool:
        """True for what is imported from a package outside of the project."""
        top = source.full_name(node).partition(".")[0]
        return top in self._outside | _HARMLESS and any(name.partition(".")[0] == top for name in source.modules)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and attributes that a statement or an expression gives to a value."""
    targets: list[ast.expr | None] = []
    value: ast.expr | None = None
    if isinstance(node, ast.Assign):
        targets, value = [*node.targets], node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        targets, value = [node.target], node.value
    elif isinstance(node, ast.withitem):
        targets, value = [node.optional_vars], node.context_expr
    for target in targets:
        if isinstance(target, (ast.Name, ast.Attribute)) and value is not None:
            yield (target.id if isinstance(target, ast.Name) else target.attr), value


def _got(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return object and name of ``getattr(object, "name")``; None for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            return value, name
    return None, ""


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _options(sources: Sequence[PythonSource]) -> list[Option]:
    """Return the options that the files declare by argparse, click, absl, or the signature of a function."""
    functions = {node.name: node for source in sources for node in source.nodes if isinstance(node, ast.FunctionDef)}
    found: dict[str, Option] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Call):
                declared = [_declared(source.full_name(node.func) or getattr(node.func, "attr", ""), node)]
                if source.full_name(node.func) in _BY_SIGNATURE and node.args and isinstance(node.args[0], ast.Name):
                    declared = _of_signature(functions.get(node.args[0].id))
                found |= {option.name: option for option in declared if option is not None}
    return [*found.values()]


def _declared(function: str, call: ast.Call) -> Option | None:
    """Return the option that a call declares, if it does."""
    words = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = [flag.partition("/")[0] for flag in words if flag.startswith("-")]
    values = {word.arg: word.value for word in call.keywords}
    kind = function.rpartition(".")[2]
    if kind in ("add_argument", "option") and flags:
        return _option(max(flags, key=len), values.get("default"), values.get("help"))
    if kind.startswith("DEFINE_") and words:
        default, about = (*call.args[1:3], None, None)[:2]
        return _option(f"--{words[0]}", default, about)
    return None


#: Calls that leave flags to others which argparse does not know.
_PARTLY = {"parse_known_args", "parse_known_intermixed_args"}
_PARSER = re.compile("(?i)parser")


def _flags(sources: Sequence[PythonSource]) -> tuple[frozenset[str], bool]:
    """Return the flags that the files declare by argparse, and whether a first file takes surely no other ones.

    That is so if it calls ``parse_args()`` of a parser that the files make, no other code gets the parser or the words,
    and each flag is a plain text.
    """
    nodes = [(node, source) for source in sources for node in source.nodes]
    functions = {node.name for node, _ in nodes if isinstance(node, ast.FunctionDef)}

    def makes_parser(node: ast.expr, source: PythonSource) -> bool:
        if not isinstance(node, ast.Call):
            return False
        return source.full_name(node.func) == "argparse.ArgumentParser" or last_name(node.func) in functions

    made: dict[str, set[bool]] = {}
    flags, parses, is_open = {"-h", "--help"}, False, False
    for node, source in nodes:
        for name, value in _assigned(node):
            made.setdefault(name, set()).add(makes_parser(value, source))
        is_open |= getattr(node, "attr", getattr(node, "id", None)) == "argv"
        is_open |= isinstance(node, ast.ClassDef) and any(last_name(base).endswith("Parser") for base in node.bases)
        if not isinstance(node, ast.Call):
            continue
        name, words = last_name(node.func), {word.arg: word.value for word in node.keywords}
        given = [*node.args, *words.values()]
        is_open |= name not in functions and any(_PARSER.search(last_name(each)) for each in given)
        is_open |= name in _PARTLY or "prefix_chars" in words
        is_open |= name.endswith("Parser") and source.full_name(node.func) != "argparse.ArgumentParser"
        if name == "parse_args" and not given and source is sources[0] and isinstance(node.func, ast.Attribute):
            parses, of = True, node.func.value
            is_open |= not makes_parser(of, source) and made.get(last_name(of)) != {True}
        if name == "add_argument":
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            flags |= {text for text in texts if isinstance(text, str) and text.startswith("-")}
            is_open |= len(texts) < len(node.args) or None in words or last_name(words.get("nargs")) == "REMAINDER"
            if last_name(words.get("action")) == "BooleanOptionalAction":
                flags |= {f"--no-{text.removeprefix('--')}" for text in texts if isinstance(text, str)}
    return frozenset(flags), parses and not is_open


def _of_signature(function: ast.FunctionDef | None) -> list[Option | None]:
    """Return the options that fire, typer or tyro makes of a function's arguments."""
    if function is None:
        return []
    takes = function.args
    without = len(takes.args) - len(takes.defaults)
    defaults: list[ast.expr | None] = [*[None] * without, *takes.defaults, *takes.kw_defaults]
    arguments = [*takes.args, *takes.kwonlyargs]
    return [_option(f"--{each.arg}", value, None) for each, value in zip(arguments, defaults, strict=True)]


def _option(flag: str, default: ast.expr | None, about: ast.expr | None) -> Option:
    shown = "" if default is None or _is_none(default) else f"default {ast.unparse(default)}"
    text = about.value if isinstance(about, ast.Constant) and isinstance(about.value, str) else ""
    return Option(flag, "; ".join(filter(None, (shown, " ".join(text.split())))))


def _alike(option: str, leaf: str) -> bool:
    """True if an option is likely what a key means: ``--learning-rate`` is ``lr``, ``--batch`` is in its name."""
    words = option.replace("-", "_").lower().split("_")
    joined = "_".join(words)
    return (
        joined in (leaf, leaf.replace("_", ""))
        or "".join(word[:1] for word in words) == leaf
        or (len(joined) > 3 and (joined in leaf or leaf in joined))
    )
