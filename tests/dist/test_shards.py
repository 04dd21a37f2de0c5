"""Training on Parquet as Spark writes it: every sample once.

Four ranks train, one is killed, and three continue. Spark itself writes the files where pyspark and Java are installed;
else pyarrow writes the same folders.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest

from tests.dist.test_local_runs import END_S, TOOLKIT, ranks, reached, the_run
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.dist, pytest.mark.soak]

ROWS, BATCH, EPOCHS = 3000, 22, 2  # 22 divides neither the rows nor 4 or 3 ranks

#: Each rank writes down which sample it got at which position of the run.
JOB = """
import json, os, time

import torch

import toolkit


class Job(toolkit.Job):
    def train_set(self):
        with self.main_first():
            return toolkit.ShardedData(self.config.data.root, columns=["id", "x", "day"])

    def model(self):
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        line = [batch.positions.tolist(), batch["id"].tolist(), batch["day"].tolist()]
        with open(self.folder / f"seen-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
        time.sleep(0.02)
        return toolkit.Loss.mean((model(batch["x"].float())[:, 0] - batch["day"]).square().mean())
"""

SPARK = """
import sys
from pyspark.sql import SparkSession, functions as f

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.range(int(sys.argv[2])).withColumn("day", f.col("id") % 5)
rows = rows.withColumn("x", f.array(f.col("id") / 1000.0, f.lit(1.0)))
rows.repartition(3).write.partitionBy("day").option("parquet.block.size", 16384).parquet(sys.argv[1])
spark.stop()
"""


def has_spark() -> bool:
    return (
        shutil.which("java") is not None
        and subprocess.run([sys.executable, "-c", "import pyspark"], stderr=subprocess.DEVNULL).returncode == 0
    )


def write_as_spark(root: Path) -> None:
    from pyarrow import parquet

    root.mkdir()
    for day in range(5):
        ids = list(range(day, ROWS, 5))
        folder = root / f"day={day}"
        folder.mkdir()
        for part in range(3):
            table = pa.table({"id": ids[part::3], "x": [[i / 1000, 1.0] for i in ids[part::3]]})
            path = folder / f"part-{part:05d}-4b6a.c000.snappy.parquet"
            parquet.write_table(table, path, row_group_size=70)
            (folder / f".{path.name}.crc").write_bytes(b"crc")
    (root / "_SUCCESS").touch()
    (root / "._SUCCESS.crc").write_bytes(b"crc")


def run(*argv: str, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE * 4 * END_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("writer", ["spark", "pyarrow"])
def test_four_ranks_train_on_sparks_parquet_one_is_killed_and_three_go_on(
    env: dict[str, str], tmp_path: Path, writer: str
) -> None:
    root = tmp_path / "table"
    if writer == "spark":
        if not has_spark():
            pytest.skip("pyspark or Java is not installed")
        (tmp_path / "write.py").write_text(SPARK)
        run(sys.executable, "write.py", str(root), str(ROWS), env=env, cwd=tmp_path)
        assert (root / "_SUCCESS").exists()
    else:
        write_as_spark(root)
    (tmp_path / "train.py").write_text(JOB)
    (tmp_path / "train.yaml").write_text(
        f"job: ./train.py\ncluster: {{tasks_per_node: 4}}\ndata: {{root: {root}, global_batch_size: {BATCH}}}\n"
        f"train: {{epochs: {EPOCHS}}}\ncheckpoint: {{every_steps: 10}}\nretry: {{max_failures: 0}}\n"
    )
    with subprocess.Popen(
        [*TOOLKIT, "submit", "train.yaml", "--executor", "local", "--wait"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        folder = the_run(env)
        reached(folder, 45)
        os.kill(ranks(env)[2], signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 1, out
    before = {path.name for path in folder.path.glob("seen-*.jsonl")}
    assert len(before) == 4
    resume = [*TOOLKIT, "resume", folder.id, "cluster.tasks_per_node=3", "--wait"]
    run(*resume, env=env, cwd=tmp_path)

    assert [attempt.world_size for attempt in folder.attempts()] == [4, 3]
    taken: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for path in folder.path.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            for position, sample, day in zip(*json.loads(line), strict=True):
                taken[position].add((sample, day))
    assert len([path for path in folder.path.glob("seen-*.jsonl") if path.name not in before]) == 3
    # Steps that the second attempt made again, and the passes that prime a start, saw the same samples.
    assert all(len(samples) == 1 for samples in taken.values())
    order = [next(iter(taken[position])) for position in range(EPOCHS * ROWS)]
    for epoch in range(EPOCHS):
        assert sorted(order[epoch * ROWS : (epoch + 1) * ROWS]) == [(i, i % 5) for i in range(ROWS)]
