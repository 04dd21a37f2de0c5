"""The Slurm of the stories: one box for the session, and other boxes on request."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box, BoxError, BoxUnavailable
from tests.box.namespaces import tail
from tests.slurm.site import Site
from tests.waiting import wait_for
from toolkit.files import rundir

BoxFactory = Callable[..., Box]


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """Four nodes of Slurm 22.05, plain; TOOLKIT_BOX_SLURM and TOOLKIT_BOX_PROFILE choose another kind."""
    with ExitStack() as stack:
        yield start_box(stack)


@pytest.fixture
def make_box() -> Iterator[BoxFactory]:
    """Starts boxes with Box's own arguments, and takes them down after the test."""
    with ExitStack() as stack:
        yield lambda **options: start_box(stack, **options)


def start_box(stack: ExitStack, **options: Any) -> Box:
    """Return a running box that ends with `stack`. Skip, or fail if Slurm is required, where none can run."""
    chosen = {"slurm": os.environ.get("TOOLKIT_BOX_SLURM"), "profile": os.environ.get("TOOLKIT_BOX_PROFILE")}
    options = {**{key: value for key, value in chosen.items() if value}, **options}
    try:
        return stack.enter_context(Box(**options))
    except BoxUnavailable as reason:
        if os.environ.get("TOOLKIT_REQUIRE_SLURM") == "1":
            raise
        pytest.skip(f"no Slurm to be had: {reason}")


@pytest.fixture
def site(box: Box, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A user of the session's box, with a folder of their own. What they leave running is a failure."""
    yield from visit(box, request)


def visit(box: Box, request: pytest.FixtureRequest) -> Iterator[Site]:
    """The same for any box."""
    folder = box.shared / re.sub(r"[^\w.-]+", "-", request.node.name)
    folder.mkdir()
    site = Site(box, folder)
    site.give(folder)
    yield site
    tell(site)
    box.run(["scancel", "--signal=KILL", "--full", f"--user={site.user or 'root'}"], check=False)
    box.run(["scancel", f"--user={site.user or 'root'}"])
    box.run(["scancel", "--user=root"])
    try:
        box.wait_idle(timeout=60)
    except BoxError:
        box.revive()  # or the stories after this one fail, too
        raise
    wait_for(lambda: not site.processes(), 20, f"no process of ours on any node, but {site.processes()}")


def tell(site: Site) -> None:
    """Print how things stand at the end of a story: pytest shows it of one that failed."""
    print(site.box.run(["squeue", "--long"], check=False).stdout)
    with suppress(OSError):  # a story may have taken the disk away
        for run in rundir.all_runs(site.runs):
            print(tail(run.logs / "supervisor.log", 20))


def visit_with_small_disk(
    make_box: BoxFactory, request: pytest.FixtureRequest, folder: Path, size: str
) -> Iterator[tuple[Site, Path]]:
    """Yield a shared disk of this size and a site with its runs on it. No fault touches its ``traces``."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(disk)], check=True)
    for each in (folder, *folder.parents[:3]):  # pytest's folders are root's alone, and a strict box has users
        each.chmod(0o755)
    try:
        for site in visit(make_box(shared=[disk]), request):
            (site.folder / "traces").mkdir()
            (site.folder / "traces").chmod(0o1777)
            (site.folder / "runs").symlink_to(disk)
            site.give(disk)  # else it would be shared by users, with a part for each
            yield site, disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
