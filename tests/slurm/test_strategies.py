"""Every strategy on four nodes of a real Slurm.

Preempted in the middle, the run comes back and learns on.
"""

import pytest

from tests.slurm.site import END_S, Site, reached
from tests.slurm.test_stop import came_back, completed
from toolkit.metrics.goodput import PARTS

pytestmark = pytest.mark.slurm

FOUR = ["cluster.nodes=4", "cluster.tasks_per_node=1"]
#: No checkpoint of its own: what the run continues from is what the stop has saved.
DIGITS = [*FOUR, "train.epochs=100", "train.eval_every=1000", "checkpoint.every_steps=100000"]
GPT = [*FOUR, "train.max_steps=150", "train.eval_every=150", "checkpoint.every_steps=100000"]
CASES = {
    "ddp": ["configs/digits_ddp.yaml", *DIGITS],
    "mpi": ["configs/digits_ddp.yaml", "dist.backend=mpi", *DIGITS],
    "fsdp": ["configs/gpt_fsdp.yaml", *GPT],
    "pipeline": ["configs/gpt_pipeline.yaml", *GPT],
    "local_sgd": ["configs/digits_local_sgd.yaml", *DIGITS],
    "parameter_server": ["configs/digits_parameter_server.yaml", *DIGITS],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_preempted_training_on_four_nodes_comes_back_and_learns_on(site: Site, name: str) -> None:
    # A node whose core or memory the checks find slow, as on a busy machine, would be the last.
    site.submit(*CASES[name], "cluster.preflight=false")
    run = site.only_run()
    reached(run, 20)
    site.preempt()
    result = completed(site, run, END_S)
    came_back(run)
    ledger = result.goodput
    assert ledger["training"] > 0.0
    attempts = run.attempts()
    assert ledger["queue"] >= attempts[-1].goodput["queue"] > 1.0  # the other job ran for two seconds
    submitted, ended = attempts[0].submitted, attempts[-1].ended
    written = (run.path / "result.json").stat().st_mtime
    assert ended - 0.1 <= submitted + sum(ledger[part] for part in PARTS) <= written + 0.1
    assert {tuple(sorted(attempt.nodes)) for attempt in attempts} == {("node1", "node2", "node3", "node4")}
    if "digits" in CASES[name][0]:
        assert result.metrics["eval/accuracy"] >= 0.95
    else:  # a guess among 256 bytes would be 5.5
        assert result.metrics["eval/loss"] < 3.0


#: Each job with all that draws random numbers, as a preemption must not change what is drawn.
JOBS = {
    "classify": ["configs/digits_ddp.yaml", *DIGITS, "train.max_steps=800", "params.mixup=0.2", "data.augment=true"],
    "language_model": ["configs/gpt_fsdp.yaml", *GPT],
}


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("job", ["classify", "language_model"])
def test_a_preempted_run_ends_with_the_bits_of_an_undisturbed_one(site: Site, job: str, strategy: str) -> None:
    for name in ("calm", "preempted"):
        site.submit(*JOBS[job], f"strategy.name={strategy}", f"name={name}")
        run = site.find(name)
        if name == "preempted":
            reached(run, 20)
            site.preempt()
        result = completed(site, run, END_S)
    came_back(run)
    # Tensors, those of the optimizer and of the order of the data included, and the figures of the evaluation.
    step = str(result.step)
    found = site.run("toolkit", "checkpoint", "diff", "preempted", step, step, "--with", "calm", check=False)
    assert found.strip() == "identical: tensors, values and meta data"
