"""``make bench`` still runs; what it measures is for a quiet machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import record
from tests.scale import curves

pytestmark = pytest.mark.dist


def output_of(*words: str) -> str:
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout


def rows_of(tmp_path: Path, *words: str) -> tuple[str, set[str]]:
    """Return what a bench prints, and the names of the rows that it writes."""
    out = output_of(*words, "--json", str(tmp_path / "rows.json"))
    return out, set(record.rows_of(tmp_path / "rows.json"))


def test_the_orders_are_compared_and_one_that_memory_cannot_hold_is_not_run(tmp_path: Path) -> None:
    size = 10**12
    out, names = rows_of(tmp_path, "tests.bench.data", "--rounds", "1", "--sizes", "100000", str(size))
    lines = out.splitlines()
    assert "100,000 samples, torch DistributedSampler: resume" in names
    assert "1,000,000,000,000 samples, ours: peak" in names
    ours, theirs = ([line for line in lines if name in line] for name in ("  ours", "  torch DistributedSampler"))
    assert [len(re.findall(r"[\d.]+ +\([\d.]+\)", line)) for line in (*ours, *theirs)] == [4, 4, 4, 0]
    assert "not run: it needs 48000 GB" in theirs[1]


def test_the_loops_are_compared() -> None:
    out = output_of("tests.bench.loop", "--steps", "20", "--turns", "1", "--rounds", "1")
    contenders = {line.split("  ")[0] for line in out.splitlines()}
    assert {"hand-written", "ours", "ours, 20 times"} <= contenders


def test_what_may_happen_to_a_step_is_compared() -> None:
    lines = output_of("tests.bench.steps", "--steps", "1", "--rounds", "1").splitlines()
    assert [line.split()[0] for line in lines] == ["sgd"] * 6 + ["adamw"] * 6


#: Of every other bench: its smallest size, and what begins a line of its table.
BENCHES: dict[str, tuple[list[str], list[str]]] = {
    "beside": (["--ranks", "2", "--rounds", "1"], ["supervisor, PSS", "rank, PSS", "GPUs of a node found"]),
    "checkpoint": (["--mib", "16", "--rounds", "1"], ["plain copy in memory", "ours ", "torch.load", "ours, verified"]),
    "collectives": (["--rounds", "1", "--kib", "4"], ["all-reduce 4 KB", "DDP step"]),
    "failures": (["--faults", "rank", "--ways", "ours"], ["| rank | "]),
    "goodput": (["--minutes", "0.5", "--every", "20"], ["failure 1", "1 failures in", "goodput", "kill to first step"]),
    "images": (
        ["--images", "50", "--rounds", "1", "--workers", "1", "--names", "1000"],
        ["largest difference", "crop          1  ours", "recipe        1  ours", "names of 1,000 files, ours"],
    ),
    "kills": (["--kills", "2"], ["job with ddp, 2 times a rank"]),
    "links": (["--rates", "1000", "--kinds", "ddp", "--steps", "1", "--samples", "0"], ["1000 Mbit/s", "ddp"]),
    "live_recovery": (["--runs", "1"], ["4 ranks, cut: 1 of 1 runs right"]),
    "listing": (["--runs", "300"], ["300 runs"]),
    "memory": (["--mib", "4", "--step", "0.1", "--copies", "2"], ["4 MiB a rank on 1 node", "4 MiB a rank on 2 nodes"]),
    "monitor": (["2"], ["monitor of 73 processes"]),
    "parts": (["--turns", "1"], ["us a step", "step ", "batch "]),
    "one_rank": (["--steps", "5", "--turns", "1", "--rounds", "1"], ["hand-written", "job", "toolkit.start"]),
    "pipeline": ([], ["2 ranks", "  2 micro-batches, gpipe", "  8 micro-batches, interleaved"]),
    "restart": (["--rounds", "1"], ["ours", "torchrun --max-restarts", "scontrol requeue"]),
    "resume_data": ([], ["| 4 x 0 to 3 x 0 | toolkit, Parquet | 0 | 0 | 60 | 60 of 60 |"]),
    "shards": (
        ["--mib", "16", "--rounds", "1", "--rows", "1000000"],
        ["index, cache", "parquet   ours", "bin       ours"],
    ),
    "startup": (["--rounds", "1"], ["seconds to", "ours, no preflight", "ours"]),
    "sweep": (["--points", "300"], ["submit 300 points", "status of all", "calls of sbatch: 1 "]),
    "strategies": (["--kinds", "fsdp"], ["ddp", "fsdp"]),
    "why": ([], ["  right where it names a cause"]),
}


#: Even the smallest size takes half a minute or more, most of these on a cluster of their own.
SLOW = {"failures", "goodput", "kills", "restart", "startup"}
SLOW |= {"collectives", "images", "links", "listing", "live_recovery", "shards", "strategies"}


def prints_its_table(name: str, tmp_path: Path) -> None:
    arguments, expected = BENCHES[name]
    out, names = rows_of(tmp_path, f"tests.bench.{name}", *arguments)
    for start in expected:
        assert any(line.startswith(start) for line in out.splitlines()), (start, out)
    assert names


def test_the_saves_are_compared(tmp_path: Path) -> None:
    prints_its_table("checkpoint", tmp_path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(BENCHES.keys() - SLOW - {"checkpoint"}))
def test_every_other_bench_still_prints_its_table(name: str, tmp_path: Path) -> None:
    prints_its_table(name, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted(SLOW))
def test_every_slow_bench_still_prints_its_table(name: str, tmp_path: Path) -> None:
    prints_its_table(name, tmp_path)


def test_no_bench_is_left_out() -> None:
    folder = Path(__file__).parents[1] / "bench"
    tested, tools = {*BENCHES, "data", "loop", "steps"}, {"__init__", "record", "compare", "draw", "page", "everything"}
    # It needs strace, leave to trace, and a run's first minute.
    assert {path.stem for path in folder.glob("*.py")} - tools == tested | {"files"}


def test_benches_are_run_by_name() -> None:
    lines = output_of("tests.bench.everything", "why").splitlines()
    assert "== why: python -m tests.bench.why" in lines
    assert [line.split()[0] for line in lines[lines.index("seconds of each bench") + 1 :]] == ["why", "all"]


def test_every_mechanism_that_grows_with_the_size_of_a_run_has_its_curve(tmp_path: Path) -> None:
    out, rows = rows_of(tmp_path, "tests.scale", "--small")
    lines = out.splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    assert names == [curve.name for curve in curves()]
    assert len(lines) == 3 * len(names)  # name, columns, one size
    # Of each curve there is a row, and no row is of something else.
    assert {name for name in names for row in rows if row.startswith(f"{name}, ")} == set(names)
    assert all(row.startswith(tuple(f"{name}, " for name in names)) for row in rows)
