"""The copy of the sources that a run keeps. What was submitted is what runs, even if the checkout changes later."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath

from toolkit.base import fsio, logs, torch_version
from toolkit.base.errors import RequestError, listing
from toolkit.base.process_limits import limits
from toolkit.config.script_keys import ActingKeys, acting_keys
from toolkit.files import records, rundir
from toolkit.files.records import JsonRecord
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership, run_config

#: Left out where git does not tell what belongs to the project: these anywhere, ...
SKIPPED_DIRS = {".git", ".venv", "__pycache__", "node_modules", ".hypothesis"}
SKIPPED_DIRS |= {".mypy_cache", ".ruff_cache", ".pytest_cache"}
#: ... and these at the top only, if they hold no modules: further down, `data` is as likely a package as data.
SKIPPED_TOP_DIRS = {"venv", "runs", "data"}
#: Variables by which git takes another repository for the one that a file is in. git sets them for its hooks.
GIT_PLACES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"}
#: Never copied, even where git tracks them: programs keep passwords, keys and tokens in files of these names.
SECRET_DIRS = {".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".kaggle", ".huggingface"}
SECRET_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".pypirc", ".npmrc", ".htpasswd",
    ".git-credentials", ".boto", ".s3cfg", "rclone.conf", ".cdsapirc", "kaggle.json", "credentials", "credentials.json",
    "credentials.db", "application_default_credentials.json", "access_tokens.db", "secrets.*",
    "client_secret*.json", "service-account*.json", "token", "token.txt", ".token", "*.token", "*_history",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.key", "*.p12", "*.pfx", "*.ppk", "*.kdbx", "*.keytab",
)  # fmt: skip
NO_SECRETS = (".env.example", ".env.sample", ".env.template", "secrets.py")
#: Files that Slurm writes into the folder of an sbatch.
SLURM_OUTPUTS = ("slurm-*.out", "slurm-*.err")
#: Names that the kernel may give the memory of a crashed process, which it writes into the process's folder.
CORE_DUMPS = ("core", "core.*", "*.core")

#: Where a laptop sends a project's files (`toolkit --on`), it lists them here. Others there are a script's outputs.
SENT = ".toolkit-sent.json"
#: The digest of that list as the laptop has sent it for this process's command, by folder.
EXPECTED: dict[Path, str] = {}

#: With these git, and tools that ask git, pass over the copies. ruff looks into hidden folders, also without git.
PASSED_OVER = {".gitignore": "*\n", ".ruff.toml": 'extend-exclude = ["*"]\n'}

log = logs.get(__name__)


def take_if_missing(project: Path, folder: Path) -> None:
    """Copy the project's sources into the folder of a run or a sweep, unless it has a copy. See :func:`take`."""
    if not rundir.code_in(folder).exists():
        take_copy(project, folder, 1)
        rundir.link_code(folder, "1")


def take_copy(project: Path, folder: Path, number: int) -> None:
    """Copy the project's sources as one of several copies. See :func:`take`."""
    copies = fsio.make_dir(folder / rundir.COPIES)
    for name, text in PASSED_OVER.items():
        fsio.write_atomic(copies / name, text, durable=False)
    take(project, copies / str(number))


@contextlib.contextmanager
def new_copy(run: RunDir, project: Path) -> Iterator[None]:
    """Copy the project's current sources into ``run`` as those that it uses. After an error it uses the earlier ones.

    All copies are kept.
    """
    copies, present = run.path / rundir.COPIES, run.code
    target = str(present.readlink())
    # The first copy of a sweep's run lies elsewhere.
    if not (copies / "1").exists():
        (copies / "1").symlink_to(os.path.relpath(run.code.resolve(), copies.resolve()))
    number = 1 + max(int(path.name) for path in copies.iterdir() if path.name.isdigit())
    try:
        take_copy(project, run.path, number)
        rundir.link_code(run.path, str(number))
        yield
    except BaseException:
        # A later submission, which took this one for dead, may have made its own copy the present one.
        if str(present.readlink()) == str(number):
            rundir.link_code(run.path, target)
        shutil.rmtree(copies / str(number), ignore_errors=True)
        raise


def changed_since(run: RunDir) -> list[str]:
    """Return the files of the project that differ from the run's copy of them. Empty where the project is not there."""
    project = project_of(run.code)
    if project is None:
        return []
    changed = []
    for copy in sorted(run.code.rglob("*.py")):
        name = copy.relative_to(run.code)
        with contextlib.suppress(OSError):  # the project has lost it: the run has not
            theirs, ours = (project / name).stat(), copy.stat()
            is_newer = theirs.st_mtime > ours.st_mtime or theirs.st_size != ours.st_size
            if is_newer and _content(project / name) != _content(copy):
                changed.append(str(name))
    return changed


def project_of(code: Path) -> Path | None:
    """Return the folder of which ``code`` is the copy; None where it is not known, or gone."""
    return _noted_folder(code / "SNAPSHOT.json")


def note_folder(run: RunDir) -> None:
    """Write down the current folder as that of a run without a copy of its sources."""
    fsio.write_json(run.path / "folder.json", {"folder": str(Path.cwd())})


def submit_folder(folder: Path) -> Path | None:
    """Return where the run or sweep of this ``folder`` was first submitted; None where that is not known, or gone."""
    return _noted_folder(folder / "folder.json") or project_of(rundir.code_in(folder))


def in_submit_folder(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Enter :func:`submit_folder`. The ranks start there, so that a script's relative paths mean the same."""
    home = submit_folder(folder)
    return contextlib.nullcontext() if home is None else contextlib.chdir(home)


@dataclass(frozen=True)
class SnapshotNote(JsonRecord):
    """``SNAPSHOT.json`` in a copy of the sources, or ``folder.json`` in a run folder, as far as they are read."""

    project: str | None = None
    folder: str | None = None
    git_sha: str | None = None
    dirty: bool | None = None


def _noted_folder(path: Path) -> Path | None:
    note = records.read_or_none(path, SnapshotNote) or SnapshotNote()
    folder = note.project or note.folder
    return Path(folder) if folder is not None and Path(folder).is_dir() else None


#: Why a file is left out that cannot be copied. Editors and builds remove files, or put others in their place.
_LEFT_OUT = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not read it"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ESTALE), "it was gone before it was copied"
    ),
}


def take(project: Path, code: Path) -> None:
    """Copy the project's sources into ``code``, with the git revision and the uncommitted diff.

    In a git checkout the project is what git tracks plus what it would not ignore, including submodules and other
    repositories in it; elsewhere it is every file outside well-known build and data folders. Secrets, runs, Slurm's
    outputs and core dumps are never copied. What else is left out is logged and noted. An existing copy is kept: a
    restarted job runs what it ran before. Raises RequestError above 200 MiB, naming the largest files, and where git
    takes too long.
    """
    if code.exists():
        return
    with uploads_locked(project) if names_sent(project) else contextlib.nullcontext():
        _take(project, code)


def _take(project: Path, code: Path) -> None:
    sources = _ProjectFiles(project)
    sources.refuse_if_large()
    sources.refuse_if_hiding()
    # The copy gets its name only when it is complete, so a copy that exists is whole.
    partial = code.with_name(f"{code.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fsio.make_dir(partial)
    # All folders first, so that each is made once.
    for folder in dict.fromkeys(PurePath(name).parent for name in sources.files):
        fsio.make_dir(partial / folder)
    for name, path in sources.files.items():
        try:
            _copy(path, partial / name, is_program=name in sources.programs)
        except OSError as error:
            if str(error.filename) != str(path) or error.errno not in _LEFT_OUT:
                raise
            sources.left_out[name] = _LEFT_OUT[error.errno]
    # Links come last: their targets must be there to be checked.
    for name, target in sources.links.items():
        fsio.make_dir((partial / name).parent)
        (partial / name).symlink_to(target)
        if not (partial / name).exists():
            sources.left_out[name] = f"a link to {target}, which is not copied"
    if sources.left_out:
        log.warning(
            "not copied with the sources: %s", listing([f"{n} ({why})" for n, why in sources.left_out.items()], 50)
        )
    _note_revision(project, partial, sources.left_out)
    fsio.rename_dir(partial, code)


@cache
def job_imports() -> frozenset[str]:
    """Return what a job's processes import: packages, and of Python's own modules those that torch and we load."""
    words = Path(__file__).with_name("needed_elsewhere.txt").read_text().split()
    # profile<2.9 is loaded by torch before 2.9.
    named = (word.partition("<2.") for word in words)
    return frozenset(name for name, _, minor in named if not minor or torch_version.is_before((2, int(minor))))


def environment(code: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which Python imports from ``code`` first."""
    # Without PYTHONSAFEPATH `python -m` would put the current folder, usually the edited checkout, before it.
    paths = [str(code), *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def job_environment(run: RunDir, environ: Mapping[str, str], token: str | None = None) -> dict[str, str]:
    """Return the variables of a job that serves ``run``, where it has ``environ`` already.

    ``token``: of its submission; None for a job that has it already.
    """
    values = {**environment(run.code, environ), "TOOLKIT_RUNS": str(run.path.parent.parent)}
    values[fsio.UMASK_VARIABLE] = fsio.users_umask()
    return values if token is None else {**values, ownership.TOKEN_VARIABLE: token}


def _git(folder: Path, *args: str) -> str | None:
    """Return what git prints; None if it fails or is not there. Raises RequestError if it takes too long."""
    command = ["git", "-C", str(folder), *args]
    environ = {name: value for name, value in os.environ.items() if name not in GIT_PLACES}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limits().git_s, errors="surrogateescape", env=environ
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"{folder}: `git {args[0]}` takes more than {limits().git_s:.0f} s; the disk may be busy: "
            "submit again, or list large folders in .gitignore"
        ) from None
    return done.stdout if done.returncode == 0 else None


class _ProjectFiles:
    """The files and links that belong to a project, by their names in the copy."""

    def __init__(self, project: Path) -> None:
        self.files: dict[str, Path] = {}
        self.programs: set[str] = set()  #: the files that are executable
        self.links: dict[str, str] = {}  #: to folders within the project: the target
        self.left_out: dict[str, str] = {}  #: the reason, by name
        self._project = project.resolve()
        runs = rundir.runs_root().resolve()
        is_inside = runs != self._project and runs.is_relative_to(self._project)
        self._runs = f"{runs.relative_to(self._project)}/" if is_inside else None
        self._copied = {self._project: ""}  #: folders, with their names in the copy
        self._sizes: list[tuple[int, str]] = []
        self._add_all(project, "")

    def _add_all(self, folder: Path, prefix: str) -> None:
        names = names_sent(folder) or _names_by_git(folder)
        if not names:
            skipped = set() if prefix else {name for name in SKIPPED_TOP_DIRS if _is_data(folder / name)}
            named = sorted(name for name in skipped if f"{name}/" != self._runs)
            self.left_out |= dict.fromkeys(named, "a folder without modules, and outside git")
            names = _walk(folder, SKIPPED_DIRS | skipped)
        for name in names:
            self._add(folder / name, prefix + name)

    def _add(self, path: Path, name: str) -> None:
        if (self._runs and f"{name}/".startswith(self._runs)) or _matches(path.name, SLURM_OUTPUTS):
            return
        if any(map(_is_of_runs, PurePath(name).parts)):
            return
        with contextlib.suppress(FileNotFoundError):  # git tracks it, and it has been deleted
            found = path.lstat()
            is_link = stat.S_ISLNK(found.st_mode)
            # A link counts as a secret by its own name or by its target's; then decide by what it leads to.
            secret = _secret(name) or (is_link and _secret(os.path.realpath(path)) and name)
            if is_link and path.exists():
                found = path.stat()
            # Certificates, which are public, have the same suffix as private keys.
            if secret or (path.suffix == ".pem" and path.is_file() and b"PRIVATE KEY" in _head(path, 1 << 16)):
                self.left_out[secret or name] = "may hold secrets"
            elif stat.S_ISREG(found.st_mode) and _is_core_dump(path):
                self.left_out[name] = "a core dump"
            elif stat.S_ISREG(found.st_mode):
                self.files[name] = path
                self._sizes.append((found.st_size, name))
                if found.st_mode & 0o111:
                    self.programs.add(name)
            elif is_link:
                self._add_link(path, name)
            elif stat.S_ISDIR(found.st_mode):  # a repository in this one, a submodule or not
                before = len(self.files)
                self._add_all(path, f"{name}/")
                if len(self.files) == before:
                    self.left_out[name] = "an empty repository; `git submodule update --init` fills a submodule"

    def refuse_if_large(self) -> None:
        """Raise RequestError, naming the largest files, if the sources are too large."""
        total = sum(size for size, _ in self._sizes)
        if total > (most := limits().snapshot_bytes):
            three = sorted(self._sizes, reverse=True)[:3]
            largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for size, name in three)
            raise RequestError(
                f"{self._project}: the sources to copy are {total / 2**20:.0f} MiB, more than {most // 2**20}; "
                f"list data and outputs in the .gitignore of a git repository; the largest: {largest}"
            )

    def refuse_if_hiding(self) -> None:
        """Raise RequestError for a module that the job would import in place of one that it needs.

        The copy is first on the job's path: for its supervisor and agents too, which run before any code of the user.
        """
        if "toolkit/run/supervise/entry.py" in self.files:  # a checkout of the toolkit runs its own
            return
        for name in self.files:
            module = name.removesuffix("/__init__.py").removesuffix(".py")
            if module != name and module in job_imports():
                kind = "a module of Python" if module in sys.stdlib_module_names else "a package that it needs"
                raise RequestError(
                    f"{self._project / name}: a job would import it in place of {module}, {kind}: rename it, or "
                    "move it below a package of your own"
                )

    def _add_link(self, path: Path, name: str) -> None:
        """Keep a link within what is copied. Copy a package outside; leave out anything else, such as data."""
        target = Path(os.path.realpath(path))  # unlike ``resolve`` it takes links in a circle
        # A link to what is copied leads to the copy.
        for real, prefix in self._copied.items():
            if target.is_relative_to(real):
                self.links[name] = os.path.relpath(PurePath(prefix, target.relative_to(real)), PurePath(name).parent)
                return
        if not target.is_dir():
            self.left_out[name] = "a link that leads nowhere"
            return
        # A folder above the project is not even looked into: it may hold the homes of all users, or a dead mount.
        is_above = self._project.is_relative_to(target)
        if is_above or not _has_modules(target):
            self.left_out[name] = f"a link to {target}, which is not a Python package"
        else:
            self._copied[target] = name
            self._add_all(path, f"{name}/")


@contextlib.contextmanager
def uploads_locked(folder: Path) -> Iterator[None]:
    """Keep the files in ``folder`` that a laptop has sent as they are meanwhile.

    Raises RequestError if they are not those that it has sent for this process's command.
    """
    with os.fdopen(fsio.lock(folder / ".toolkit-lock")):
        expected = EXPECTED.get(folder.resolve())
        if expected is not None and expected != hashlib.sha256(fsio.read_bytes(folder / SENT)).hexdigest():
            raise RequestError(f"{folder}: another command has sent other files there meanwhile; try again")
        yield


def names_sent(folder: Path) -> Iterable[str]:
    """Return the names of the files that a laptop has sent into ``folder``. None where there is no list of them.

    Raises RequestError where one leads out of it: the list came with the project, from elsewhere.
    """
    names = None
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        names = json.loads(fsio.read_text(folder / SENT))
    if not isinstance(names, dict) or any("\0" in name for name in names):
        return ()
    inside = folder.resolve()
    for name in names:
        if ".." in Path(name).parts or not (folder / name).parent.resolve().is_relative_to(inside):
            raise RequestError(f"{folder / SENT}: it lists {name}, outside this folder; remove this file")
    return names


def _names_by_git(folder: Path) -> Iterable[str]:
    """Return the names that git tracks and would track: files, links, and folders that are repositories themselves.

    Return none where git lists nothing (an ignored folder) or refuses (a folder of another user).
    """
    # One call, so that there is no list without the other.
    listed = _git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z") or ""
    names = (name.rstrip("/") for name in listed.split("\0"))
    # for a submodule that was never filled git prints "./"
    return dict.fromkeys(name for name in names if name not in ("", "."))


def _walk(top: Path, skipped_at_top: Set[str]) -> Iterator[str]:
    """Yield the files and links below ``top``, except in build folders and Python environments."""
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        if here != top and ("pyvenv.cfg" in files or "conda-meta" in folders):
            folders.clear()
            continue
        skipped = skipped_at_top if here == top else SKIPPED_DIRS
        links = [name for name in folders if (here / name).is_symlink()]
        # os.walk continues with the folders that are left in its list.
        folders[:] = [name for name in folders if name not in {*skipped, *links} and not _is_of_runs(name)]
        for name in sorted([*files, *links]):
            if name not in skipped:
                yield str((here / name).relative_to(top))


def _is_of_runs(name: str) -> bool:
    """True for the folder of a run, or of sweeps, also among runs other than the present ones."""
    return rundir.is_run_id(name) or name == rundir.SWEEPS


def _is_data(folder: Path) -> bool:
    """True for a folder, not a link to one, that holds no modules."""
    return folder.is_dir() and not folder.is_symlink() and not _has_modules(folder)


def _has_modules(folder: Path) -> bool:
    """True if modules lie in the folder or in packages right below. The first is enough: data may be large."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.py", "*/__init__.py"))


def _secret(name: str) -> str | None:
    """Return the secret part of ``name``, from the top on; None if it has none. Programs keep secrets there."""
    path = PurePath(name)
    for number, part in enumerate(path.parts, 1):
        if part in SECRET_DIRS:
            return str(PurePath(*path.parts[:number]))
    return name if _matches(path.name, SECRET_FILES) and not _matches(path.name, NO_SECRETS) else None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _head(path: Path, size: int) -> bytes:
    """Return the first bytes; none where this user may not read the file. It will not be copied either."""
    with contextlib.suppress(PermissionError), fsio.open_file(path) as file:
        return file.read(size)
    return b""


def _is_core_dump(path: Path) -> bool:
    """True for a core dump. The 16-bit number at byte 16 of an ELF file is its type; 4 is ET_CORE (elf(5))."""
    header = _head(path, 18) if _matches(path.name, CORE_DUMPS) else b""
    return header[:4] == b"\x7fELF" and header[16:] == (4).to_bytes(2, sys.byteorder)


def _content(path: Path) -> bytes:
    return fsio.read_bytes(path, fsio.LONG_BYTES)


def _copy(source: Path, target: Path, *, is_program: bool) -> None:
    """Copy the bytes into a new file. With thousands of files on a network disk each metadata call counts."""
    content = _content(source)
    mode = 0o700 if is_program else fsio.FILE_MODE
    with os.fdopen(fsio.open_private(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as copy:
        while content:
            content = content[copy.write(content) :]


def _note_revision(project: Path, code: Path, left_out: Mapping[str, str]) -> None:
    """Write ``SNAPSHOT.json`` and ``SNAPSHOT.diff``: the commit, and what was changed since, without secrets."""
    sent = None
    if names_sent(project):  # what a laptop has sent has come with its note and its diff
        sent = records.read_or_none(code / "SNAPSHOT.json", SnapshotNote)
    revision = None if sent else _git(project, "rev-parse", "HEAD")
    # Under both its names: of a renamed file git would list only the new one.
    diff_command = ("diff", "--no-renames", "HEAD")
    changed = _git(project, *diff_command, "--name-only", "-z") if revision else None
    note = {
        "project": str(project),
        "git_sha": sent.git_sha if sent else revision and revision.strip(),
        "dirty": sent.dirty if sent else bool(changed),
        "left_out": left_out,
    }
    fsio.write_json(code / "SNAPSHOT.json", note)
    if not changed:
        return
    # The diff must not hold the secrets that the copy leaves out, nor a private key that was in a file before.
    secret = [name for name in changed.split("\0") if _secret(name) or name.endswith(".pem")]
    diff = _git(project, *diff_command, "--", ":/", *[f":(exclude,top,literal){name}" for name in secret])
    if diff:
        fsio.write_atomic(code / "SNAPSHOT.diff", diff.encode(errors="surrogateescape"))


def sources_of(run: RunDir) -> Path | None:
    """Return the run's copy of its sources, or where a script without one was started; None where neither is known."""
    return run.code.resolve() if fsio.is_there(run.code) else submit_folder(run.path)


def acting_on(run: RunDir, job: str, argv: Sequence[str]) -> ActingKeys:
    """Return the keys that act on a run with this ``job`` and ``argv``. All do where its sources are not known."""
    return ActingKeys() if (folder := sources_of(run)) is None else acting_keys(job, argv, folder)


def shown_values(run: RunDir) -> tuple[dict[str, str], dict[str, str]]:
    """Return what ``run_config.values_of`` does, without the keys that do not act on the run."""
    values, hidden = run_config.values_of(run.config)
    config = run_config.read(run)
    acting = ActingKeys() if config is None else acting_on(run, config.job, config.argv)
    return {key: value for key, value in values.items() if acting.has_effect(key)}, hidden
