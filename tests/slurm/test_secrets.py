"""A secret of a run on Slurm: the ranks have it, readable places do not."""

import json
from pathlib import Path

import pytest

from tests.slurm.site import END_S, START_S, Site
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

SECRET = "hunter2-correct-horse"
SCRIPT = """
import os, pathlib, time
print("length", len(os.environ["API_TOKEN"]), flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.2)
"""


def test_a_secret_is_in_the_ranks_and_nowhere_in_slurm(site: Site) -> None:
    token, script = site.folder / "token", site.folder / "look.py"
    for path, text in ((token, SECRET), (script, SCRIPT)):
        path.write_text(text)
        path.chmod(0o600)
        site.box.run(["chown", site.user or "root", str(path)])
    size = ["cluster.nodes=2", "cluster.tasks_per_node=1", f"secrets.API_TOKEN={token}"]
    site.run("toolkit", "exec", "--name", "look", *size, "--", "python", str(script), cwd=site.folder)
    run = site.only_run()

    def ranks() -> list[int] | None:
        found = [pid for pid, command in site.box.processes() if command.endswith(str(script))]
        return found if len(found) == 2 else None

    def has_it(pid: int) -> bool:
        try:
            return SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    pids = wait_for(ranks, START_S, "two ranks")
    wait_for(lambda: all(map(has_it, pids)), START_S, "both ranks with the secret")
    assert [command for pid, command in site.box.processes() if pid not in pids and has_it(pid)] == []
    assert [command for _, command in site.box.processes() if SECRET in command] == []
    # Slurm's records of the job: what users can ask for, and what the controller and the nodes keep on disk.
    job = site.job_of(run)
    shown = site.box.run(["scontrol", "--details", "show", "job", job]).stdout
    script_of_job = site.box.run(["scontrol", "write", "batch_script", job, "-"]).stdout
    assert f"JobId={job}" in shown
    assert "#SBATCH" in script_of_job
    assert SECRET not in shown + script_of_job
    kept = site.box.run(["grep", "-rl", SECRET, "/var/spool", "/var/log"], check=False)
    assert (kept.returncode, kept.stdout) == (1, "")
    (site.folder / "go").touch()
    wait_for(run.result, END_S, "the end of the run")
    assert site.result(run.id).state == "completed", json.dumps(site.result(run.id).to_json())
    assert run.rank_log(1, 1).read_text().split() == ["length", str(len(SECRET))]
    assert [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
