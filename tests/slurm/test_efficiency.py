"""The use of a two-node job's request, beside Slurm's answers and the kernel's."""

import re
import shlex
import sys
import time
from collections.abc import Iterator

import pytest

from tests.slurm.conftest import BoxFactory, visit
from tests.slurm.site import END_S, Site, attempts_of
from tests.waiting import wait_for
from toolkit.files.run_files import JobUsage
from toolkit.files.rundir import RunDir
from toolkit.plugins.node_watch.efficiency import LEAST_MEASURED_S

pytestmark = pytest.mark.slurm

HELD, READ = 200 << 20, 600 << 20
#: The toolkit's own: torch in two processes that share most pages, the supervisor, the agent, the checks of the node.
AROUND_A_RANK = 600 << 20
#: Each rank holds memory, has a file's pages in the page cache, and keeps half a processor busy.
GREEDY = f"""
import mmap, os, pathlib, time
held = bytearray(os.urandom(1 << 20)) * {HELD >> 20}
file = open(f"read-{{os.environ['RANK']}}", "w+b")
file.truncate({READ})
pages = mmap.mmap(file.fileno(), {READ})
assert not any(pages[place] for place in range(0, {READ}, mmap.PAGESIZE))
print("ready", flush=True)
while not os.path.exists("end"):
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    pathlib.Path(f"used-{{os.environ['RANK']}}").write_text(str(time.process_time()))
    time.sleep(0.05)
"""


def sampled(run: RunDir, seconds: float) -> JobUsage | None:
    """What the job uses, once that was measured for so long."""
    usage = run.status().usage
    return usage if usage is not None and usage.cpu_held_s >= seconds * usage.cpus else None


def used_by_ranks(site: Site) -> float:
    return sum(float(file.read_text() or 0) for file in site.folder.glob("used-*"))


def test_a_job_that_asks_for_too_much_is_told_the_line_it_should_have_written(site: Site) -> None:
    (site.folder / "greedy.py").write_text(GREEDY)
    size = ["cluster.nodes=2", "cluster.cpus_per_task=2", "cluster.mem_gb=2", "cluster.time_min=40"]
    price = ["cluster.price.cpu_hour=36", "cluster.price.currency=EUR"]
    out = site.run("toolkit", "exec", *size, *price, "--", sys.executable, "greedy.py", cwd=site.folder)
    print(out)
    run = site.only_run()
    first = wait_for(lambda: sampled(run, 4), END_S, "samples of both nodes")
    shown = site.box.run(["scontrol", "show", "job", site.job_of(run)]).stdout
    # What the ranks had used by their own clocks before the next samples must be in these.
    before_s, age_s = used_by_ranks(site), time.time() - first.since
    enough_s = max(age_s, LEAST_MEASURED_S)  # less is no ground for advice
    usage = wait_for(lambda: sampled(run, enough_s), END_S, "newer samples of both nodes")
    after_s = used_by_ranks(site)
    status = site.run("toolkit", "status", run.id)
    print(status, shown)
    assert "uses " in status
    assert " of 2 GiB of memory a node" in status
    # What was asked, by Slurm itself.
    assert str(usage.nodes) == re.search(r"NumNodes=(\d+)", shown)[1]
    assert str(usage.cpus) == re.search(r"NumCPUs=(\d+)", shown)[1]
    assert "MinMemoryNode=2G" in shown
    assert usage.memory_bytes == 2 << 30
    # What is used, by the processes themselves.
    assert usage.most_bytes > HELD
    assert usage.most_bytes < HELD + AROUND_A_RANK, "the page cache was counted, or shared pages twice"
    assert before_s - 2 < usage.cpu_s < after_s + 40, "beside the ranks it is the start of Python and torch"
    (site.folder / "end").touch()
    site.box.wait_job(site.job_of(run), END_S)
    why = site.run("toolkit", "why", run.id, "--all")
    print(why)
    told = run.result().efficiency
    assert told.currency == "EUR"
    assert told.cost == pytest.approx(told.usage.cpu_held_s / 100, rel=0.01)
    line = next(line.strip() for line in why.splitlines() if line.startswith("    sbatch --nodes=2"))
    options = dict(re.findall(r"--([\w-]+)=(\S+)", line))
    assert (options["ntasks-per-node"], options["time"]) == ("1", "5")
    # The toolkit's import of torch, for the ranks' store, needs no processor of its own.
    assert options["cpus-per-task"] == "1"
    assert options["mem"] in ("512M", "768M", "1G")
    # Slurm takes the line as it stands.
    words = shlex.split(line)
    site.run(words[0], "--test-only", *words[1:], "--wrap=true")


@pytest.fixture
def strict_site(make_box: BoxFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site that enforces what a job has asked for."""
    yield from visit(make_box(nodes=1, profile="strict"), request)


def test_a_rank_that_is_killed_for_lack_of_memory_is_not_started_again(strict_site: Site) -> None:
    site = strict_site
    (site.folder / "greedy.py").write_text("held = b'x' * (1300 << 20)\n")
    size = ["cluster.nodes=1", "cluster.mem_gb=1", "cluster.time_min=5"]
    site.run("toolkit", "exec", *size, "--", sys.executable, "greedy.py", cwd=site.folder)
    run = site.only_run()
    wait_for(run.result, END_S, "the end of the run")
    assert [attempt.cause for attempt in attempts_of(run, 1)] == ["out_of_memory"]
    assert "would fail again unchanged: give it more (cluster.mem_gb)" in site.run("toolkit", "why", run.id)
    assert follow_advice(site, run, "cluster.mem_gb=2") == "completed"


def follow_advice(site: Site, run: RunDir, override: str) -> str:
    """Type what `toolkit why` says to do next. Return how the run ends then."""
    advice = site.run("toolkit", "why", run.id).splitlines()[-1]
    (command,) = re.findall(r"`toolkit ([^`]*)`", advice)
    assert command == f"resume {run.id} {override}", advice
    before = len(run.attempts())
    site.run("toolkit", *shlex.split(command))
    return wait_for(lambda: run.result() if len(run.attempts()) > before else None, END_S, "the end of the run").state


@pytest.mark.soak
def test_a_script_that_needs_more_time_gets_it_by_what_its_advice_says(strict_site: Site) -> None:
    site = strict_site
    (site.folder / "slow.py").write_text("import time\ntime.sleep(50)\n")
    size = ["cluster.nodes=1", "cluster.time_min=1", "retry.max_requeues=0"]
    site.run("toolkit", "exec", *size, "--", sys.executable, "slow.py", cwd=site.folder)
    run = site.only_run()
    wait_for(run.result, END_S, "the end of the run")
    assert [attempt.cause for attempt in attempts_of(run, 1)] == ["timeout"]
    # Slurm may send its warning up to a minute too early: twice as much may not be enough.
    ends = [follow_advice(site, run, "cluster.time_min=2")]
    if ends == ["failed"]:
        ends.append(follow_advice(site, run, "cluster.time_min=4"))
    assert ends[-1] == "completed"
