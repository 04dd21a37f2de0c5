"""Scripts of other libraries and own loops, preempted and killed on a real Slurm.

They end as undisturbed ones.
"""

import os
import signal

import pytest

from tests.dist.test_integrations import END, SCRIPTS, STEPS, weights
from tests.dist.test_own_scripts import LOOPS
from tests.slurm.site import END_S, Site
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.slurm

SIZE = ["cluster.nodes=1", "cluster.tasks_per_node=3", "checkpoint.every_steps=20"]
#: Put before what a script does in each step.
STEP = {
    "accelerate": "        optimizer.zero_grad()",
    "lightning": "        inputs, targets = batch\n        loss",
    "transformers": "resume = ",
    **dict.fromkeys(LOOPS, "            loss = "),
}
SLOWER = {
    "accelerate": "        __import__('time').sleep(0.2)\n",
    "lightning": "        __import__('time').sleep(0.2)\n",
    "transformers": "model.register_forward_pre_hook(lambda *_: __import__('time').sleep(0.2))\n",
    **dict.fromkeys(LOOPS, "            __import__('time').sleep(0.2)\n"),
}


def submitted(site: Site, library: str, name: str, *, is_slow: bool) -> RunDir:
    project = site.folder / name
    project.mkdir()
    text = (SCRIPTS / f"{library}_after.py").read_text()
    assert text.count(STEP[library]) == 1
    slower = SLOWER[library] if is_slow else ""
    (project / f"{name}.py").write_text(text.replace(STEP[library], slower + STEP[library]))
    site.give(project)
    site.run("toolkit", "submit", f"{name}.py", *SIZE, cwd=project)
    return site.find(name)


@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=[] if name == "accelerate" else pytest.mark.soak) for name in STEP]
)
def test_a_preempted_and_killed_script_ends_as_the_undisturbed_one(site: Site, library: str) -> None:
    quick = submitted(site, library, "quick", is_slow=False)
    assert wait_for(quick.result, END_S, "a result").state == "completed"
    run = submitted(site, library, "slow", is_slow=True)
    wait_for(lambda: list(run.checkpoints.glob("step-*/manifest.json")), END_S, "a checkpoint")
    site.preempt()
    second = run.rank_log(2, 0)
    wait_for(lambda: second.exists() and "resuming from" in second.read_text(), END_S, "the second attempt")
    os.kill(site.ranks()[-1], signal.SIGKILL)
    result = wait_for(run.result, END_S, "a result")
    assert (result.state, result.step) == ("completed", STEPS.get(library, 96))
    assert [attempt.decision for attempt in run.attempts()] == ["requeue", "restart", "finish"]
    ends = [weights(site.folder / name / END.get(library, "end.pt")) for name in ("quick", "slow")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not ends[0][name].equal(ends[1][name])] == []
