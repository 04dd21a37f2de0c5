"""Rules for the sources. Imports point down, the login node loads no torch, test names are short."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.bench import page
from toolkit import registry
from toolkit.run.attempt.attempt import Attempt

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "toolkit"

#: A package may import those on lower floors; modules of one package may import each other unless it has floors of
#: its own.
FLOORS = [
    ["base"],
    ["registry"],
    ["devices"],
    ["files"],
    ["constraints"],
    ["slurm"],
    ["config"],
    ["nodes"],
    ["hang"],
    ["ranks"],
    ["checkpoint", "data", "metrics"],
    ["strategies", "run"],
    ["train"],
    ["cli"],
    ["plugins"],
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
#: The floors inside a package.
ROOMS = {
    "nodes": [["agent"], ["allocation"], ["start"]],
    "run": [["job"], ["records"], ["prepare", "attempt"], ["rank", "requeue"], ["supervise"], ["submission"]],
    "strategies": [
        ["objective"],
        ["protocol", "priming"],
        ["models"],
        ["optimizer_state"],
        ["layouts", "update"],
        ["."],
    ],
    "cli": [["."], ["commands"]],
}


def test_each_package_has_a_floor_and_a_line_in_the_map_of_the_files() -> None:
    packages = {path.parent for path in PACKAGE.rglob("__init__.py")}
    assert {path.name for path in packages if path.parent == PACKAGE} <= FLOOR_OF.keys()
    text = page.packages()
    assert [path for path in packages if f"| `{path.relative_to(ROOT)}/` |" not in text] == []


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def blocks(node: ast.AST) -> list[ast.AST]:
    """Return the statements of a node, and the handlers and cases that hold statements."""
    kinds = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, kinds)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in blocks(node):
        yield child
        yield from statements(child)


@cache
def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{alias.name}" if node.module == "toolkit" else node.module for alias in node.names
            }
    return found


def part_of(module: str) -> str:
    return module.split(".")[1]


SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")]


#: What the ranks of a job run: it meets the job's own class, and a script as a user would write it.
USING_PUBLIC_NAMES = {"run/rank/user_job.py", "plugins/site/proof_rank.py", "plugins/site/evidence_rank.py"}


#: Of each kind of process, the file that makes its optional parts.
ROOTS = {"nodes/agent/agent_components.py", "run/supervise/supervisor_components.py", "train/rank_components.py"}
#: Where an optional part is made: below an `if` on what asks for it.
MAKING_PARTS = {
    *ROOTS,
    *("strategies/__init__.py", "strategies/update.py", "run/rank/main.py"),
    *("run/prepare/new_run.py", "run/submission/executors.py"),
    *("run/submission/resume_run.py", "run/submission/submit.py", "run/attempt/advice.py", "files/rundir.py"),
    "config/validation.py",
}


def test_imports_point_down() -> None:
    upward = []
    for path in MODULES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if "toolkit" in imports_of(path) and str(path.relative_to(PACKAGE)) not in USING_PUBLIC_NAMES:
            upward.append(f"{path} imports toolkit itself, whose names are of any floor")
        for module in imports_of(path):
            if not module.startswith("toolkit.") or part_of(module) == "__version__":
                continue
            other = part_of(module)
            if other == "plugins" and (part == "cli" or str(path.relative_to(PACKAGE)) in MAKING_PARTS):
                continue
            if not (other == part or FLOOR_OF[other] < FLOOR_OF[part] or FLOOR_OF[part] == 0 == FLOOR_OF[other]):
                upward.append(f"{path} (floor {FLOOR_OF[part]}) imports {module} (floor {FLOOR_OF[other]})")
    assert upward == []


def test_optional_parts_are_imported_where_they_are_made_and_asked_for() -> None:
    """A start of the core loads none of them. The commands of a login node are on the top floor, and may."""
    using = {path for path in MODULES if any(m.startswith("toolkit.plugins") for m in imports_of(path))}
    core = {str(path.relative_to(PACKAGE)): path for path in using}
    core = {name: path for name, path in core.items() if not name.startswith(("cli/", "plugins/"))}
    assert core.keys() - MAKING_PARTS == set()
    assert MAKING_PARTS - core.keys() == set()
    for path in core.values():
        assert not [module for module in loads_of(path) if module.startswith("toolkit.plugins")], path


def test_only_the_parts_of_a_process_are_made_by_best_effort() -> None:
    using = {str(path.relative_to(PACKAGE)) for path in MODULES if "toolkit.base.best_effort" in imports_of(path)}
    assert using == ROOTS


#: What torch, the makers and their programs call devices.
OF_ONE_KIND = re.compile(r"torch\.(cuda|xpu|hip)\b|is_cuda|nvidia(?!\.com)|\bcuda\b|rocm|nvml|_VISIBLE_DEVICES")

#: They read each maker's figures for who watches a node.
READERS = [PACKAGE / f"plugins/node_watch/{name}.py" for name in ("drivers", "nvml", "sysfs")]


def test_only_the_room_of_devices_knows_what_sets_them_apart() -> None:
    """In code, that is: a comment may name a maker, as may a page of documentation."""
    found = []
    for path in SOURCES:
        if path.parent == PACKAGE / "devices" or path in READERS:
            continue
        tree = tree_of(path)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name):
                text = ast.unparse(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = node.value
            else:
                continue
            if OF_ONE_KIND.search(text):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:60]!r}")
    assert found == []


@pytest.mark.parametrize("package", ROOMS)
def test_imports_inside_a_package_point_down(package: str) -> None:
    floor_of = {room: floor for floor, rooms in enumerate(ROOMS[package]) for room in rooms}
    upward = []
    for path in (PACKAGE / package).rglob("*.py"):
        room = room_of(path.relative_to(PACKAGE / package).parts, floor_of)
        for module in imports_of(path):
            if module.startswith(f"toolkit.{package}."):
                other = room_of(module.split(".")[2:], floor_of)
                if other != room and floor_of[other] >= floor_of[room]:
                    upward.append(f"{path} (room {room}) imports {module} (room {other})")
    assert upward == []


def room_of(parts: Sequence[str], rooms: Iterable[str]) -> str:
    name = parts[0].removesuffix(".py")
    return name if name in rooms else "."


LOGIN_NODE = [
    *("base", *FLOORS[1], "limits", "config", "hang", "slurm", "nodes", "run"),
    *(
        "cli",
        *("cli", "plugins/node_watch", "plugins/site", "plugins/staging", "plugins/sweep", "plugins/trackers"),
        "plugins/report/why",
    ),
]
#: What ranks and nodes run of a part of the login node.
ON_RANKS = {"plugins/site/gpu_measure.py", "plugins/site/proof_rank.py", "plugins/site/evidence_rank.py"}
#: What takes seconds to import, or is not there on a login node.
HEAVY = {"torch", "torchvision", "tensorboard", "numpy"}
#: Commands that load a model or a data set themselves. All others run on a login node, or leave that to the ranks.
WITH_TORCH = {"data", "evaluate", "export", "generate"}


def files_of(module: str) -> list[Path]:
    """Return the files that are run when ``module`` is imported: its packages' and its own."""
    parts = module.split(".")
    names = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    files = [file for name in names for file in (ROOT / name / "__init__.py", ROOT / f"{name}.py")]
    return [file for file in files if file.is_file()]


def loads(nodes: Sequence[ast.AST], in_functions: bool = False) -> Iterator[str]:
    """Yield the modules that ``nodes`` import when they run; those in functions only if ``in_functions``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a module, or a name in one
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from loads(node.orelse, in_functions)
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from loads(blocks(node), in_functions)


@cache
def loads_of(path: Path, in_functions: bool = False) -> tuple[str, ...]:
    return tuple(loads(tree_of(path).body, in_functions))


def file_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def way_to_heavy(names: Iterable[str]) -> str | None:
    """Return how imports of ``names`` load one of HEAVY: each file on the way. None if they do not."""
    came_from: dict[Path, Path | None] = {}
    work: list[tuple[str, Path | None]] = [(name, None) for name in names]
    while work:
        name, importer = work.pop()
        if name.split(".")[0] in HEAVY:
            way = [name]
            while importer is not None:
                way.insert(0, str(importer.relative_to(ROOT)))
                importer = came_from[importer]
            return " -> ".join(way)
        for file in files_of(name) if name.startswith("toolkit.") else []:
            if file not in came_from:
                came_from[file] = importer
                work += [(other, file) for other in loads_of(file)]
    return None


@pytest.mark.parametrize("part", LOGIN_NODE)
def test_login_node_modules_never_import_torch(part: str) -> None:
    """Nor do they import a module that imports it, and so on."""
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else list((PACKAGE / part).rglob("*.py"))
    files = [path for path in files if str(path.relative_to(PACKAGE)) not in ON_RANKS]
    for path in files:
        assert not {m.split(".")[0] for m in imports_of(path)} & HEAVY, path
    assert way_to_heavy([".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]) is None


def test_no_command_of_the_login_node_reaches_torch_by_its_imports() -> None:
    ways = {
        command: way_to_heavy(loads_of(file_of(module), in_functions=True))
        for command, module in registry.names("commands").items()
    }
    assert {command: way for command, way in ways.items() if way and command not in WITH_TORCH} == {}
    assert {command for command, way in ways.items() if way} == WITH_TORCH, "the walk finds torch where it is needed"


def test_checks_of_a_node_start_without_site_packages() -> None:
    """They start with ``python -S`` on every node of a job.

    What they load must come with Python or with the toolkit.
    """
    for path in (*(PACKAGE / "plugins/node_watch").glob("*.py"), *(PACKAGE / "plugins/site/checks").glob("*.py")):
        if path.stem == "preflight":  # it runs in the supervisor
            continue
        foreign = {module.split(".")[0] for module in imports_of(path)} - {*sys.stdlib_module_names, "toolkit"}
        assert not foreign, path
    code = "import sys, toolkit.plugins.site.checks.__main__; print(len(sys.modules))"
    argv = [sys.executable, "-S", "-P", "-c", code]
    done = subprocess.run(argv, env={"PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 160, "each module costs every job's start on every node"


def test_toolkit_never_imports_jobs() -> None:
    for path in SOURCES:
        assert not [m for m in imports_of(path) if m.split(".")[0] == "jobs"], path


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["status"],
        ["placement"],
        ["doctor"],
        ["submit", "configs/digits_ddp.yaml", "--dry-run", "--executor", "slurm"],
    ],
    ids=lambda argv: argv[0],
)
def test_commands_of_the_login_node_do_not_load_torch(argv: list[str]) -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize(("command", "most"), [("--help", 67), ("status", 46)])
def test_a_command_of_the_login_node_imports_few_modules(tmp_path: Path, command: str, most: int) -> None:
    """Each takes a part of a millisecond, on a shared file system several. Counted without runs."""
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        f"try:\n    main([{command!r}])\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('toolkit')))"
    )
    environ = {**os.environ, "TOOLKIT_RUNS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert len(loaded) <= most, loaded


def test_only_fsio_renames_files() -> None:
    for path in SOURCES:
        if path.name != "fsio.py":
            assert not [call for call in ("os.replace(", "os.rename(", ".rename(") if call in text_of(path)], path


#: Where files are read that are neither of a run nor of a cache that others may write into, and why.
OTHER_FILES = {
    "the other end of an ssh, and the package itself": ("cli/remote.py", "cli/login_side.py"),
    "what the kernel tells": (
        *("base/this_node", "base/procfs", "base/signals", "devices/"),
        *("hang", "nodes/agent/wire_protocol", "nodes/agent/processes", "nodes/agent/zygote"),
        *("plugins/node_watch/", "plugins/site/checks/", "plugins/site/proof_rank"),
        *("slurm/network", "train/saver"),
    ),
    "what is installed with the toolkit": (
        *("config/cluster", "config/job_module", "data/datasets", "cli/new_project", "plugins/report/page"),
        *("plugins/report/why/diagnosis", "run/prepare/snapshot"),
    ),
    "data, sources and files that the user names, who may name a pipe": (
        *("nodes/start/python_command", "plugins/formats/shards/", "plugins/staging/", "plugins/formats/tokens/"),
        *("plugins/report/why/page", "slurm/cluster_name"),
    ),
    "what the same process has made": (
        *("base/fsio", "plugins/formats/images/photographs", "plugins/memory/", "train/profile"),
    ),
}


def reads(call: ast.Call) -> bool:
    """True for a call that opens a file for reading by its path."""
    code = ast.unparse(call)
    of, name = (ast.unparse(call.func).rpartition(".")[i] for i in (0, 2))
    if name in ("read_text", "read_bytes"):
        return of != "fsio"
    words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    known = (
        not of
        or of in ("os", "io")
        or bool({*words} & {"r", "rb", "r+b"})
        or any(one.arg in ("errors", "encoding", "buffering", "mode") for one in call.keywords)
    )
    if name != "open" or not known or "os.devnull" in code or "O_DIRECTORY" in code:
        return False
    return not any(word.startswith(("w", "a", "x")) for word in words) and "O_CREAT" not in code


def test_home_folders_are_looked_up_in_one_way() -> None:
    """A user may have none: pathlib raises RuntimeError then, and fsio.expand does not. limits refuses such a path."""
    for path in SOURCES:
        if path.name not in ("fsio.py", "constraints.py"):
            assert ".expanduser()" not in text_of(path), path


def test_files_of_a_run_are_opened_in_one_way() -> None:
    """A pipe or a device in their place, in a folder of several users, would hang who opens them in another."""
    exceptions = tuple(str(PACKAGE / name) for names in OTHER_FILES.values() for name in names)
    found = {
        f"{path}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and reads(node)
    }
    assert {one for one in found if not one.startswith(exceptions)} == set()
    assert [name for name in exceptions if not any(one.startswith(name) for one in found)] == []


#: Where ``exists`` and its kind may answer False for a file server that is away, and why.
MAY_MISS = {
    "sources, programs and weights that the user names, which are then said to be missing": (
        *("run/prepare/", "run/rank/user_job", "run/submission/submit", "nodes/start/python_command"),
        *("files/origin", "train/initial", "nodes/start/user_script"),
    ),
    "what is only shown or looked for by name": ("run/attempt/advice", "files/rundir"),
    "a store of keys, which has no files": ("ranks/agreement/rounds",),
}


SWALLOW_ERRORS = ("exists", "is_file", "is_dir", "isfile", "isdir", "glob", "rglob")


def test_a_file_server_that_is_away_has_files_wherever_something_depends_on_it() -> None:
    """From Python 3.14 on ``exists`` and its kind answer False for every error; from 3.13 on ``glob`` finds nothing."""
    exceptions = tuple(str(PACKAGE / name) for names in MAY_MISS.values() for name in names)
    rooms = tuple(str(PACKAGE / name) for name in ("run/", "checkpoint/", "ranks/", "train/", "files/", "nodes/"))
    found = {
        f"{path}:{node.lineno}"
        for path in SOURCES
        if str(path).startswith(rooms)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in SWALLOW_ERRORS
    }
    assert {one for one in found if not one.startswith(exceptions)} == set()
    assert [name for name in exceptions if not any(one.startswith(name) for one in found)] == []


def test_texts_of_errors_are_cut_where_they_are_written() -> None:
    """An exception may hold a whole tensor. All but what a rank prints into its own log goes through error_file."""
    formats = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("traceback.format", "traceback.print"))
    }
    assert formats == {"files/error_file.py", "data/workers.py", "run/rank/script_end.py"}


NAMES_OF_PROGRAMS = (
    "plugins/site/reservations",
    *("slurm/commands", "slurm/srun_commands", "plugins/site/site_profile", "run/requeue/follow_up"),
)


def test_only_few_modules_name_slurms_programs() -> None:
    programs = {"sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"}
    allowed = {PACKAGE / f"{name}.py" for name in NAMES_OF_PROGRAMS}
    for path in {*SOURCES} - allowed:
        if not any(program in text_of(path) for program in programs):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
                assert node.elts[0].value not in programs, f"{path}: {ast.unparse(node)}"


def test_files_of_tests_outside_of_packages_have_different_names() -> None:
    """Pytest would collect one of two, and say so only where both are collected."""
    loose = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert [name for name, count in Counter(path.name for path in loose).items() if count > 1] == []


def test_names_of_tests_are_short_enough_to_read() -> None:
    names = re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")))
    assert [name for name in names if len(name) > 80] == []


def test_a_class_has_a_name_of_its_own_and_no_file_is_longer_than_a_subject() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        assert text_of(path).count("\n") <= 700, f"{path}: split it by subject"
        for node in statements(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_only_an_attempt_changes_itself() -> None:
    """Each of its moves has one rule. Written by many, 23 fields of it had as many rules as writers."""
    fields = {field.name for field in dataclasses.fields(Attempt)}
    changed = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)) if path.name != "attempt.py" else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in [one for given in targets for one in getattr(given, "elts", [given])]:
                if isinstance(target, ast.Attribute) and target.attr in fields:
                    owner = ast.unparse(target.value)
                    changed += [f"{path}: {owner}.{target.attr}"] * owner.endswith(("attempt", "left"))
    assert changed == []
