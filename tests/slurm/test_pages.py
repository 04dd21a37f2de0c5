"""The commands of README.md and docs/ work as printed, on a real Slurm.

The size of a job is made to fit the box, and the files that a page assumes are made. Nothing else is changed.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from jobs.models import build_model
from tests.dist.test_wheel import PARTS
from tests.pages import PAGES, ROOT, blocks, console_lines, story
from tests.slurm.site import END_S, Site
from tests.waiting import wait_for
from toolkit.files import rundir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

#: What needs an index of packages, a run at work, a tracker or many minutes, names no run, or is what runs this test.
#: Benches run at their smallest size in tests/dist/test_bench.py.
ELSEWHERE = re.compile(
    r"pip install|make (check|coverage|test|docs|box|bench|gpu|soak)|tests\.(scale|bench)|\bRUN\b"
    r"|toolkit (stacks|profile|watch|upload|serve) |--on login\."  # test_laptop.py has the way from a laptop
)
#: A box has four nodes of two CPUs, no GPU, and no partition of that name.
FITTED = [
    (r" cluster\.gpus_per_node=1(?= .*tasks_per_gpu)| cluster\.tasks_per_gpu=4", ""),  # with GPUs: test_gpus.py
    (r"cluster\.nodes=8", "cluster.nodes=2"),
    (r"cluster\.tasks_per_node=4", "cluster.tasks_per_node=1"),
    (r"--(ntasks|nproc)-per-node=4", r"--\1-per-node=2"),
    (r" cluster\.gpus_per_node=4|#SBATCH --gpus-per-node=4\n", ""),
    (r" cluster\.partition=gpu|\"cluster\.partition=gpu\", ", ""),
    (r"-p fast : -p slow", "-p main : -p cancel"),
    (r"partition: slow", "partition: cancel"),
    (r"/scratch/other_books", "~/books"),
    (r"--optuna ([24])0", r"--optuna \1"),
    (r"CONFIG key=value", "configs/mine.yaml train.epochs=2"),
    (r"CONFIG", "configs/mine.yaml"),
]
#: mpirun refuses root, and more ranks than it counts cores.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Runs that a page speaks of as made before.
RUNS = {
    "digits-ddp": "toolkit submit configs/digits_ddp.yaml train.epochs=2 --wait",
    "gpt-fsdp": "toolkit submit configs/gpt_fsdp.yaml train.max_steps=10 --wait",
    "lr-and-batch": "toolkit sweep configs/digits_ddp.yaml optim.lr=1e-2,1e-1 train.epochs=2 --name lr-and-batch",
}


START = "with toolkit.start() as run:"
#: What the words behind `--` and `args.` on the pages are for.
OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("data", nargs="?")
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--amp", action="store_true")
parser.parse_args()
"""


def script_of(page: str) -> str:
    """Return the ``train.py`` of a page. It is the page's own or the loop of docs/loop.md."""
    if page == "job.md":
        return blocks("docs/job.md", "python")[0]
    loop = blocks("docs/loop.md", "python")[0].replace("10_000", "40")
    return loop.replace(START, f"{OPTIONS}{PARTS}\n{START}")


def project_of(site: Site, page: str) -> Path:
    """Make the folder that a page assumes. It has the checkout's configs and jobs, and the reader's files."""
    project = site.folder / "project"
    project.mkdir()
    for folder in ("configs", "jobs", "sbatch"):
        shutil.copytree(ROOT / folder, project / folder)
    for name in (".venv", "Makefile", "pyproject.toml", "requirements.lock", "requirements-uv.lock"):  # `make train`
        (project / name).symlink_to(ROOT / name)
    (project / "configs/mine.yaml").write_text("extends: digits_ddp.yaml\nname: mine\ntrain: {epochs: 2}\n")
    (project / "configs/finetune.yaml").write_text("extends: gpt_fsdp.yaml\nname: finetune\ntrain: {max_steps: 10}\n")
    (project / "train.py").write_text(script_of(page))
    (project / "loop.yaml").write_text("job: train.py\n")
    (project / "texts").write_text("import os\ndef main(\n")
    if page == "job.md":
        (project / "train.yaml").write_text(blocks("docs/job.md", "yaml")[0])
    if page == "checkpoints.md":  # what `toolkit data fetch` puts there from the network
        (project / "data/weights").mkdir(parents=True)
        torch.save(
            build_model("mlp", 10, (1, 8, 8)).state_dict(), project / "data/weights/ResNet50_Weights.IMAGENET1K_V2.pth"
        )
    if page == "config.md":
        declared = blocks("docs/config.md", "python")[0]
        reads = script_of(page).replace(START, f"{START}\n    run.params(Params)")
        (project / "keys.py").write_text(f"{declared}\n\n{reads}")
        (project / "mine.yaml").write_text("job: keys.py\nparams: {width: 256}\n")
    return project


def fill_home(home: Path) -> None:
    torch.save(build_model("mlp", 10, (1, 8, 8)).state_dict(), home / "resnet50.pt")
    for folder in ("scans", "books"):
        (home / folder).mkdir()
    Image.new("L", (8, 8), 128).save(home / "scans/one.png")
    (home / "books/book.txt").write_text("It was the best of times, it was the worst of times. " * 400)


#: Pages whose blocks follow from each other.
STORIES = ("tutorial.md", "coming-from.md")


def typed_lines(block: str) -> list[str]:
    """The commands of a block. One that is shown with an error must end with it."""
    refused = re.sub(
        r"(?m)^\$ (.*)\ntoolkit: error: (.*?)(?: \.\.\.)?$",
        lambda shown: f"$ ! {shown[1]} 2> error || false; grep -F {shlex.quote(shown[2])} error",
        block,
    )
    return [line for line in console_lines(refused) if not ELSEWHERE.search(line)]


#: By page, what is typed: the commands of a console, and scripts for a login node.
SHOWN = [
    *(
        pytest.param(page.name, "\n".join(lines), id=f"{page.stem}-{number}")
        for page in PAGES
        if page.name not in STORIES
        for number, block in enumerate(blocks(page, "console"))
        if (lines := typed_lines(block))
    ),
    *(
        pytest.param(page.name, f"python - <<'END'\n{block}END", id=f"{page.stem}-script")
        for page in PAGES
        if page.name not in STORIES
        for block in blocks(page, "python")
        if "submit(" in block
    ),
]


def fitted(text: str) -> str:
    for shown, fitting in FITTED:
        text = re.sub(shown, fitting, text)
    return text


@pytest.mark.parametrize(("page", "typed"), SHOWN)
def test_what_a_page_shows_at_a_prompt_works(site: Site, page: str, typed: str) -> None:
    project = project_of(site, page)
    fill_home(site.folder)
    site.give(site.folder)
    text = fitted("\n".join([*(command for name, command in RUNS.items() if name in typed), typed]))
    env: dict[str, Any] = {"HOME": str(site.folder), "TOOLKIT_RUNS": str(site.runs), **MPI}
    site.run("bash", "-euxc", text, cwd=project, timeout=3 * END_S, **env)
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 2 * END_S, "the end of all jobs")
    results = [run.result() for run in rundir.all_runs(site.runs)]
    assert [result and result.state for result in results] == ["completed"] * len(results)
    assert results or not re.search(
        r"(?<!! )toolkit submit (?!.*(--help|--dry-run))|toolkit exec|sbatch|run configs", text
    )


def test_the_tutorial_ends_as_it_says(site: Site) -> None:
    """A preempted run ends with the loss of one that nothing has disturbed."""
    project = project_of(site, "tutorial.md")
    site.give(site.folder)
    env: dict[str, Any] = {"HOME": str(site.folder)}
    shown = site.run(
        "bash", "-c", story((ROOT / "docs/tutorial.md").read_text()), cwd=project, timeout=3 * END_S, **env
    )
    assert re.search(r"0 to (\d+) +preempted +requeue\n.* \1 to 15360 +completed +finish", shown), shown
    assert re.search(r"train/loss +(\S+) +\1 +15360 +\1 +\1 +0\n", shown), shown
    assert "IDENTICAL" in shown
    assert "best: args.lr=" in shown
    assert (project / "tutorial/report.html").exists()


def parts(page: str) -> list[Any]:
    """Return the parts of a page that have something to type."""
    found = re.split(r"(?m)^## ", (ROOT / "docs" / page).read_text())
    return [pytest.param(part, id=part.partition("\n")[0]) for part in found if "```console" in part]


@pytest.mark.parametrize("part", parts("coming-from.md"))
def test_what_was_before_and_what_becomes_of_it_work(site: Site, part: str) -> None:
    project = project_of(site, "coming-from.md")
    site.give(site.folder)
    env: dict[str, Any] = {"HOME": str(site.folder)}
    site.run("bash", "-c", fitted(story(part)), cwd=project, timeout=3 * END_S, **env)
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 2 * END_S, "the end of all jobs")
    results = [run.result() for run in rundir.all_runs(site.runs)]
    assert results
    assert [result and result.state for result in results] == ["completed"] * len(results)
