"""The copies of a node: whole or absent, shared by jobs, removed when unused."""

import errno
import fcntl
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.file_operations import file_operations
from tests.process_limits import ChangeLimits
from tests.unit.nodes.test_agents import Site, check, opened
from tests.unit.nodes.test_steps import await_true
from toolkit.base import fsio, staged, this_node
from toolkit.base.errors import RequestError
from toolkit.config import JobConfig
from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.messages import Message, NodeStaged, StacksOrder, StageOrder
from toolkit.nodes.start import agent_starters
from toolkit.nodes.start.launcher import AllRanksEnded
from toolkit.plugins.staging import archive, copying
from toolkit.plugins.staging import node_side as copies
from toolkit.plugins.staging.archive import Archive, ArchiveSource, PackRequest, StagingError
from toolkit.plugins.staging.copying import CopyRequest, DamagedArchiveError
from toolkit.plugins.staging.supervisor_side import NodeStaging


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a" * 5000)
    (folder / "sub/run.sh").write_text("#!/bin/sh\n")
    (folder / "sub/run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/run.sh")
    os.utime(folder / "a.txt", (1e9, 1e9))
    return folder


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def packed(source: Path, cache: Path, program: str | None = None) -> Archive:
    return archive.pack(ArchiveSource(str(source), program), PackRequest(str(cache), ()))


def content(folder: Path) -> dict[str, object]:
    """Return everything below ``folder``, as the standard library sees it."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()  # noqa: PTH115
        for path in folder.rglob("*")
    }


def copied(made: Archive, node: Path) -> Path:
    copy = copying.copy(made, [node])
    os.close(copy.lock)
    return copy.path


def own_folder(node: Path, made: Archive | None = None) -> Path:
    """Return the user's folder on the node's disk, or that of one copy."""
    own = node / f"toolkit-stage-{os.geteuid()}"
    return own if made is None else own / made.key


def killed_at(number: int, call: Callable[[], object]) -> bool:
    """Call ``call`` in a fork killed at its ``number``-th file operation. False if it ran to its end."""
    numbers = itertools.count(1)

    def seen(operation: str, path: str) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            with file_operations(seen):
                call()
            os._exit(0)
        finally:
            os._exit(1)  # `call` has raised: the assertion below fails
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def test_a_copy_has_what_the_folder_has(source: Path, node: Path, cache: Path) -> None:
    copy = copied(packed(source, cache), node)
    assert content(copy) == content(source)
    assert (copy / "a.txt").stat().st_mtime == 1e9
    assert os.access(copy / "sub/run.sh", os.X_OK)
    assert not os.access(copy / "a.txt", os.X_OK)


def test_a_file_is_its_own_package(source: Path, node: Path, cache: Path) -> None:
    made = packed(source / "a.txt", cache)
    assert made.file == str(source / "a.txt")
    copy = copied(made, node)
    assert copy.name == "a.txt"
    assert copy.read_bytes() == (source / "a.txt").read_bytes()
    assert copy.stat().st_mtime_ns == (source / "a.txt").stat().st_mtime_ns, "an index of its samples fits every copy"


@pytest.fixture
def made(source: Path, cache: Path) -> Archive:
    return packed(source, cache)


def test_a_second_job_finds_the_copy_of_the_first(made: Archive, node: Path) -> None:
    first = copying.copy(made, [node])
    Path(made.file).unlink()
    second = copying.copy(made, [node])
    assert (first.is_new, second.is_new) == (True, False)
    assert first.path == second.path


def test_a_copy_that_lost_a_file_or_is_of_another_boot_is_made_anew(source: Path, node: Path, cache: Path) -> None:
    made = packed(source, cache)
    copy = copied(made, node)
    (copy / "a.txt").unlink()
    assert content(copied(made, node)) == content(source)
    mark = own_folder(node, made) / "whole.json"
    mark.write_text(mark.read_text().replace('"boot": "', '"boot": "0'))
    (copy / "a.txt").write_text("")
    assert content(copied(made, node)) == content(source)


def test_a_kill_at_any_write_leaves_no_torn_copy(made: Archive, source: Path, node: Path) -> None:
    for number in itertools.count(1):
        was_killed = killed_at(number, lambda: copying.copy(made, [node]))
        folder = own_folder(node, made)
        if copying.is_whole(folder):
            assert content(folder / "copy") == content(source)
        assert content(copied(made, node)) == content(source)
        assert {path.name for path in folder.iterdir()} == {"copy", "whole.json"}
        shutil.rmtree(folder)
        if not was_killed:
            break
    assert number > 20


def test_a_kill_of_the_packer_leaves_no_torn_package(source: Path, node: Path, tmp_path: Path) -> None:
    for number in itertools.count(1):
        cache = tmp_path / f"cache-{number}"
        was_killed = killed_at(number, lambda cache=cache: packed(source, cache))  # type: ignore[misc]
        assert content(copied(packed(source, cache), node)) == content(source)
        shutil.rmtree(own_folder(node))
        if not was_killed:
            break
    assert number > 8


@pytest.mark.parametrize("place", [100, -2000, "cut"])
def test_a_damaged_package_is_found_by_its_digest(source: Path, node: Path, cache: Path, place: int | str) -> None:
    made = packed(source, cache)
    data = bytearray(Path(made.file).read_bytes())
    if isinstance(place, int):
        data[place] ^= 1
    else:
        del data[4000:]
    Path(made.file).write_bytes(data)
    with pytest.raises(DamagedArchiveError, match="is damaged"):
        copying.copy(made, [node])
    assert not list(own_folder(node).iterdir())
    # the supervisor throws it away, and the next start makes another one
    archive.discard(made)
    assert content(copied(packed(source, cache), node)) == content(source)


def test_a_file_that_changes_meanwhile_is_not_taken(source: Path, node: Path, cache: Path) -> None:
    made = packed(source / "a.txt", cache)
    (source / "a.txt").write_text("b" * 5000)
    with pytest.raises(DamagedArchiveError, match=r"a\.txt is damaged, or was changed"):
        copying.copy(made, [node])
    assert packed(source / "a.txt", cache).key != made.key


def test_a_full_disk_is_named_and_the_next_one_taken(
    source: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    made, full = packed(source, cache), tmp_path / "full"
    full.mkdir()
    free = {full: 10, node: 10**9}
    monkeypatch.setattr(archive, "room_bytes", lambda folder: free[folder.parent])
    assert copying.copy(made, [full, node]).path.is_relative_to(node)
    with pytest.raises(StagingError, match=r"full has room for 10 B, and .* are needed"):
        copying.copy(made, [full])

    # and a disk that fills up while it is unpacked
    def seen(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    free[full] = 10**9
    with file_operations(seen), pytest.raises(StagingError, match="full: No space left"):
        copying.copy(made, [full])
    assert not list(own_folder(full).iterdir())


def test_a_folder_of_somebody_else_is_not_used(source: Path, node: Path, tmp_path: Path, cache: Path) -> None:
    made = packed(source, cache)
    own = own_folder(node)
    own.symlink_to(tmp_path)
    with pytest.raises(StagingError, match="not a folder that only this user can write to"):
        copying.copy(made, [node])
    own.unlink()
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    with pytest.raises(StagingError, match="only this user"):
        copying.copy(made, [node])


def test_a_folder_that_others_could_replace_is_not_used(made: Archive, source: Path, node: Path) -> None:
    node.chmod(0o777)
    with pytest.raises(StagingError, match=r"copies: others may write into .*node \(mode 0777\)"):
        copying.copy(made, [node])
    node.chmod(0o1777)  # as /tmp is
    assert content(copied(made, node)) == content(source)


def test_a_damaged_copy_that_another_job_uses_is_not_waited_for(
    source: Path, node: Path, cache: Path, change_limits: ChangeLimits
) -> None:
    change_limits(other_copiers_s=0.1)
    made = packed(source, cache)
    used = copying.copy(made, [node])
    (used.path / "a.txt").unlink()
    with pytest.raises(StagingError, match="is incomplete, and another job uses it"):
        copying.copy(made, [node])


def test_unused_copies_go_and_those_in_use_stay(source: Path, node: Path, cache: Path) -> None:
    old, used = packed(source / "a.txt", cache), packed(source / "sub", cache)
    copied(old, node)
    held = copying.copy(used, [node])
    (own_folder(node) / "dead/copy").mkdir(parents=True)  # of a job that was killed while it unpacked
    for made in (old, used):
        os.utime(own_folder(node, made) / "whole.json", (0, 0))
    new = packed(source, cache)
    copied(new, node)
    assert {path.name for path in own_folder(node).iterdir()} == {used.key, new.key}
    assert content(held.path) == content(source / "sub")


def test_two_jobs_at_once_make_one_copy(made: Archive, source: Path, node: Path, cache: Path) -> None:
    request = json.dumps(CopyRequest((made,), str(node)).to_json())
    command, pipe = [sys.executable, "-m", "toolkit.plugins.staging.copying"], subprocess.PIPE
    jobs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        for job in jobs:
            job.stdin.write(request)
            job.stdin.close()
            job.stdin = None
        answers = [json.loads(job.stdout.readline()) for job in jobs if job.stdout is not None]
        assert answers[0]["copies"] == answers[1]["copies"] == {str(source): str(answers[0]["copies"][str(source)])}
        assert sum(answer["took_s"] > 0 for answer in answers) == 1
        # each holds the copy: it stays although it was not used for long
        os.utime(own_folder(node, made) / "whole.json", (0, 0))
        copied(packed(source / "a.txt", cache), node)
        assert own_folder(node, made).is_dir()
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def test_a_copied_environment_starts_from_its_copy(node: Path, tmp_path: Path, cache: Path) -> None:
    prefix = tmp_path / "venv"
    venv.create(prefix, symlinks=True, with_pip=False)
    site = next(prefix.glob("lib/*/site-packages"))
    (site / "marker.py").write_text("import sys\n")
    (site / "big.a").write_bytes(bytes(archive.LARGE_BYTES))
    (site / "elsewhere.pth").write_text(f"{tmp_path}\n")
    script = prefix / "bin/tool"
    script.write_text(f"#!{prefix}/bin/python\nimport marker, sys; print(marker.__file__, *sys.path)\n")
    script.chmod(0o755)
    made = archive.pack(ArchiveSource(str(prefix), "bin/python"), PackRequest(str(cache), ()))
    copy = copied(made, node)
    told = subprocess.run([copy / "bin/tool"], capture_output=True, text=True, check=True).stdout.split()
    assert told[0] == str(copy / site.relative_to(prefix) / "marker.py")
    assert str(tmp_path) in told  # what an editable install names stays where it is
    assert (copy / site.relative_to(prefix) / "big.a").readlink() == site / "big.a"
    environ = staged.environment({str(prefix): str(copy)}, {"PATH": f"/bin:{prefix}/bin"})
    assert environ["PATH"] == f"/bin:{copy}/bin:{prefix}/bin"


def test_an_environment_that_does_not_work_elsewhere_is_refused(node: Path, tmp_path: Path, cache: Path) -> None:
    prefix = tmp_path / "venv"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python").write_text("#!/bin/sh\necho /somewhere\n")
    (prefix / "bin/python").chmod(0o755)
    made = archive.pack(ArchiveSource(str(prefix), "bin/python"), PackRequest(str(cache), ()))
    with pytest.raises(StagingError, match="does not work from"):
        copying.copy(made, [node])


def test_paths_lead_to_the_copy_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/x").touch()
    monkeypatch.setenv(staged.VARIABLE, json.dumps({"/data/set": str(tmp_path / "copy")}))
    assert staged.staged("/data/set/x") == tmp_path / "copy/x"
    assert staged.origin(tmp_path / "copy/x") == tmp_path / "copy/x"  # no such original is here
    assert staged.staged("/data/set/gone") == Path("/data/set/gone")
    assert staged.staged("/data/settle") == Path("/data/settle")


def test_packages_that_no_job_uses_are_removed(source: Path, cache: Path) -> None:
    old = packed(source, cache)
    (source / "a.txt").write_text("new")
    packed(source, cache)
    assert Path(old.file).exists()  # a job may be about to read it
    two_days_ago = time.time() - 2 * 86_400
    os.utime(Path(old.file).with_suffix(".json"), (two_days_ago, two_days_ago))
    new = packed(source, cache)
    assert [path.name for path in cache.glob("*.tar")] == [f"{new.key}.tar"]


def test_what_cannot_be_packed_is_named(source: Path, tmp_path: Path, cache: Path) -> None:
    request = PackRequest(
        str(cache),
        (ArchiveSource(str(tmp_path / "none")), ArchiveSource("/dev/null"), ArchiveSource(str(source))),
        most_bytes=9,  # less than the third one has
    )
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.plugins.staging.archive"],
        input=json.dumps(request.to_json()),
        capture_output=True,
        text=True,
        check=True,
    )
    problems = [json.loads(line)["problem"] for line in done.stdout.splitlines()]
    assert problems[0] == f"{tmp_path / 'none'}: No such file or directory"
    assert problems[1] == "/dev/null is neither a file nor a folder"
    assert "a node would take longer to copy that" in problems[2]


def test_a_shared_file_system_is_told_from_a_node_s_own(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\ntmpfs /home/my\\040tmp tmpfs rw 0 0\n")
    assert this_node.file_system(Path("/home/me/venv"), mounts) == "nfs4"
    assert this_node.file_system(Path("/home/my tmp/x"), mounts) == "tmpfs"
    assert this_node.file_system(Path("/homes"), mounts) == "ext4"


def clean(folder: Path, tmp_path: Path) -> None:
    """Let the system's own cleaner remove all that it may below ``folder``."""
    (tmp_path / "clean.conf").write_text(f"d {folder} 0755 - - 0\n")
    subprocess.run(["systemd-tmpfiles", "--clean", str(tmp_path / "clean.conf")], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_systemd_tmpfiles_leaves_a_copy_in_use_alone(source: Path, node: Path, tmp_path: Path, cache: Path) -> None:
    copy = copying.copy(packed(source, cache), [node])
    before = content(node)
    clean(node, tmp_path)
    assert content(node) == before
    os.close(copy.lock)
    clean(node, tmp_path)
    assert content(node) == {}


def test_a_copy_in_use_is_locked_as_a_folder(made: Archive, node: Path) -> None:
    copying.copy(made, [node])
    with pytest.raises(BlockingIOError):
        copying._lock(own_folder(node, made), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_compiled_files_do_not_make_a_copy_damaged_and_a_lost_folder_does(
    source: Path, node: Path, cache: Path
) -> None:
    (source / "empty").mkdir()
    made = packed(source, cache)
    copy = copied(made, node)
    (copy / "sub/__pycache__").mkdir()
    (copy / "sub/__pycache__/run.cpython-311.pyc").write_bytes(b"x")
    assert copying.is_whole(copy.parent)
    (copy / "empty").rmdir()
    assert not copying.is_whole(copy.parent)


def test_files_of_a_copy_count_as_just_read(source: Path, node: Path, cache: Path) -> None:
    copy = copied(packed(source, cache), node)
    assert (copy / "a.txt").stat().st_atime > time.time() - 60


def test_copies_take_half_of_the_memory_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_node, "file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(this_node, "available_memory_bytes", lambda: 1000)
    assert archive.room_bytes(tmp_path) == 500


class Copying(NodeStaging):
    """Keeps the agents' messages about their copies. The test decides what is copied."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.run, JobConfig(), site.allocation, site.launcher, lambda text: None)
        site.agents.listeners = (self,)
        self.staged: list[Any] = []

    def take_message(self, host: str, message: Any) -> None:
        if isinstance(message, NodeStaged):
            self.staged.append(message)


#: Stands for the agent's program, on a node where no process can be forked for a helper.
FORKLESS_AGENT = """
import errno, pathlib, sys
from toolkit.nodes.agent import helpers, node
from toolkit.devices import on_node as gpus
def fail(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
helpers.start_child = fail
gpus.DRIVER = pathlib.Path("/")
node.MONITOR_AFTER_S = 0.0
node.main(sys.argv[1:])
"""


def test_an_agent_whose_helpers_cannot_be_started_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = agent_starters._command
    command = [sys.executable, "-P", "-c", FORKLESS_AGENT]  # replaces the first 4 words of the usual command
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    site = Site(tmp_path)
    copying = Copying(site)
    opened(site)
    copying.request_copies(CopyRequest((Archive("/set", "key", "/set.tar", 0, 0, True, 0, 0),)), wait_s=60.0)
    stacks_order = StacksOrder(1, ("stack-reader",), "/run", ())
    site.agents.request({"here": stacks_order}, site.events)
    log = site.run.path / "logs"
    await_true(lambda: any("monitor has ended" in file.read_text() for file in log.rglob("agent-*.log")))
    await_true(lambda: copying.staged)
    assert "Resource temporarily unavailable" in copying.staged[0].problems[0]
    check(site, ["true"])
    assert "cannot be started" in site.next().message.text
    (said,) = (file.read_text() for file in log.rglob("agent-*.log"))
    for text in ("on_node import main; main() cannot be started", "stack-reader cannot be started"):
        assert text in said
    site.close()


#: An agent that looks at its copies before each attempt.
CHECKING_AGENT = """import sys
from toolkit.base import process_limits
from toolkit.nodes.agent import node
process_limits.override(copy_is_whole_s=0.0)
node.main(sys.argv[1:])
"""


def test_an_attempt_does_not_use_a_copy_that_has_lost_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    usual = agent_starters._command
    command = [sys.executable, "-P", "-c", CHECKING_AGENT]
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    sources = [tmp_path / "set", tmp_path / "file"]
    sources[0].mkdir()
    for path in (sources[0] / "part", sources[1]):
        path.write_text("content")
    packages = [archive.pack(ArchiveSource(str(each)), PackRequest(str(cache), ())) for each in sources]
    (tmp_path / "node").mkdir()
    site = Site(tmp_path)
    copying = Copying(site)
    opened(site)
    copying.request_copies(CopyRequest(tuple(packages), str(tmp_path / "node")), wait_s=60.0)
    await_true(lambda: copying.staged)
    copies = copying.staged[0].copies
    assert [*copies] == [str(each) for each in sources]

    def attempt() -> Any:
        site.start(f"echo ${staged.VARIABLE}")
        assert site.next() == AllRanksEnded(0)
        site.store.close()
        return json.loads(site.log(0))

    assert attempt() == copies
    (Path(copies[str(sources[0])]) / "part").unlink()  # as a cleaner of the node's disk does
    assert attempt() == {str(sources[1]): copies[str(sources[1])]}
    assert "set: files of its copy were removed from this node's disk" in copying.staged[1].problems[0]
    site.close()


WHOLE = NodeStaged({"/data": "/tmp/copy"}, (), (), 1.5)


class Printing(Helpers):
    texts: list[str]

    def ask(self, command: Sequence[str], *arguments: Any, **options: Any) -> None:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        super().ask((sys.executable, "-I", "-S", "-c", f"print({text!r})"), *arguments, **options)


class Serving:
    """The part of an agent that keeps copies, and the messages that it sends. Its helpers print ``texts`` in turn."""

    def __init__(self, *texts: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.helpers = Printing(self.selector)
        self.helpers.texts = [*texts]
        self.copies: dict[str, str] = {}
        self.is_held = False
        self.sent: list[Message] = []
        played: Any = self  # in place of Processes
        self.keeper = copies.CopyKeeper(self.helpers, played, self.sent.append)

    def defer_starts(self, wait_s: float) -> None:
        self.is_held = True

    def use_copies(self, paths: dict[str, str]) -> None:
        self.copies |= paths
        self.is_held = False

    def serve(self) -> None:
        end = time.monotonic() + 30
        while self.selector.get_map() and time.monotonic() < end:
            for key, _ in self.selector.select(1):
                key.data()
        for pid in self.helpers.pids:
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(WHOLE.to_json())[:-30],
        "[1, 2]",
        "null",
        '{"copies": []}',
        '{"copies": {"/data": 3}, "problems": []}',
        "[" * 10**5,
    ],
    ids=["cut off", "a list", "null", "no object", "no text", "deep"],
)
def test_an_answer_about_copies_that_is_none_is_ignored_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Serving(text)
    agent.keeper.stage(StageOrder({}, 60.0))
    agent.serve()
    assert (agent.copies, agent.is_held) == ({}, False)  # the ranks need not wait
    (sent,) = agent.sent
    assert isinstance(sent, NodeStaged)
    assert sent.copies == {}
    assert "the copying was killed" in sent.problems[0]
    assert "an invalid answer of a helper was ignored" in caplog.text


@pytest.mark.parametrize(
    ("text", "left"),
    [(json.dumps({"/data": "/tmp/copy"}), {"/data": "/tmp/copy"}), ("{}", {}), ('{"/data": "/t', {}), ("3", {})],
)
def test_without_a_certain_answer_no_copy_is_used(text: str, left: dict[str, str], change_limits: ChangeLimits) -> None:
    agent = Serving(json.dumps(WHOLE.to_json()), text)
    agent.keeper.stage(StageOrder({}, 0.0))
    agent.serve()
    agent.keeper.check()
    assert not agent.selector.get_map(), "it was whole a moment ago"
    change_limits(copy_is_whole_s=0.0)
    agent.keeper.check()
    assert (agent.copies, agent.is_held) == ({}, True)
    # serve() has waited for the copying process already
    agent.helpers.pids.clear()
    agent.serve()
    assert (agent.copies, agent.is_held) == (left, False)
    assert agent.sent[0] == WHOLE
    assert len(agent.sent) == (1 if left else 2)


def members(made: Archive) -> dict[str, str]:
    """Return the target of each member, by name. It is empty unless the member is a link."""
    with tarfile.open(made.file) as tar:
        return {member.name: member.linkname for member in tar}


def test_a_cache_that_others_may_write_to_is_refused(made: Archive, source: Path, cache: Path) -> None:
    cache.chmod(0o777)
    for path in (source, source / "a.txt"):
        with pytest.raises(RequestError, match=r"copies for the nodes: .*cache belongs to .* and has mode 0777"):
            packed(path, cache)
    cache.chmod(0o700)
    cache.parent.chmod(0o777)
    with pytest.raises(RequestError, match="others may write into"):
        packed(source, cache)
    cache.parent.chmod(0o700)
    assert packed(source, cache) == made


@pytest.mark.parametrize("name", ["", "a.txt"])
def test_a_record_that_names_another_file_counts_for_nothing(source: Path, cache: Path, name: str) -> None:
    made = packed(source / name, cache)
    precious = cache.parent / "precious"
    precious.write_bytes(bytes(made.size_bytes))
    fsio.write_json(cache / f"{made.key}.json", made.replace(file=str(precious)).to_json())
    again = packed(source / name, cache)
    assert again.file == made.file
    archive.discard(again)
    assert precious.exists()


def test_data_is_packed_with_folders_named_as_those_of_conda(source: Path, cache: Path) -> None:
    for name in ("envs", "pkgs"):
        (source / name).mkdir()
        (source / name / "x").touch()
    assert {"envs/x", "pkgs/x"} <= members(packed(source, cache)).keys()
    of_environment = members(packed(source, cache, program="bin/python"))
    assert of_environment["envs"] == str(source / "envs")
    assert "envs/x" not in of_environment


def test_a_relative_link_out_of_the_source_becomes_absolute(source: Path, cache: Path) -> None:
    (source.parent / "outside").write_text("outside")
    links = {"out": "../outside", "sub/out": "../../outside", "back": "../data/a.txt", "dangling": "../none"}
    inside = {"in": "a.txt", "sub/in": "../a.txt", "sub/top": "..", "device": "/dev/null"}
    for name, target in {**links, **inside}.items():
        (source / name).symlink_to(target)
    targets = members(packed(source, cache))
    assert {name: targets[name] for name in inside} == inside
    for name in links:
        assert Path(targets[name]).is_absolute()
        assert Path(targets[name]).resolve() == (source / name).resolve()


def test_two_jobs_may_make_the_same_package_at_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, others = archive._add, list[Archive]()
    read_while_replaced: list[bytes] = []

    def add_after_the_other(tar: tarfile.TarFile, path: Path, entry: archive._PackageEntry) -> None:
        if not others:
            monkeypatch.setattr(archive, "_add", add)
            others.append(packed(source, cache))
            read_while_replaced.append(Path(others[0].file).read_bytes())
        add(tar, path, entry)

    monkeypatch.setattr(archive, "_add", add_after_the_other)
    made = packed(source, cache)
    assert made == others[0]
    assert Path(made.file).read_bytes() == read_while_replaced[0]
    assert sorted(path.name for path in cache.iterdir()) == [f"{made.key}.json", f"{made.key}.tar"]


def test_a_change_while_packing_leaves_the_package_of_another_job(
    made: Archive, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / f"{made.key}.json").unlink()  # the other job has not yet written it
    add = archive._add

    def add_and_change(tar: tarfile.TarFile, path: Path, entry: archive._PackageEntry) -> None:
        add(tar, path, entry)
        os.utime(source / "a.txt", (0, 0))

    monkeypatch.setattr(archive, "_add", add_and_change)
    with pytest.raises(StagingError, match="was changed while it was packed"):
        packed(source, cache)
    assert [path.name for path in cache.iterdir()] == [f"{made.key}.tar"]
