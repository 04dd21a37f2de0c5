"""README.md and docs/: short, linked, and with commands that can be typed."""

import argparse
import builtins
import importlib.util
import json
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from tests.pages import PAGES, ROOT, blocks, console_lines
from toolkit.base import torch_version
from toolkit.cli import main as cli
from toolkit.config import all_keys, load_config, validate
from toolkit.plugins.sweep import request, submission
from toolkit.plugins.sweep.request import Options


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command of the toolkit in the pages' consoles. The lines that continue it are included."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in console_lines(block):
                for part in line.replace("\\\n", " ").split("&&"):
                    words = part.partition("  #")[0].strip()
                    words = re.sub(r"^(?:[A-Z_]+='[^']*' |[A-Z_]+=\S+ )*", "", words)
                    words = re.sub(r"^.*(?:python -m toolkit|torchrun .* -m toolkit) ", "toolkit ", words)
                    if words.startswith("toolkit "):
                        yield page.name, words


def test_the_readme_is_for_the_first_ten_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w./-]+\.md)", (ROOT / "docs/index.md").read_text()))
    of_the_site = set(re.findall(r"[\w-]+\.md", (ROOT / "docs/mkdocs/mkdocs.yml").read_text()))
    pages = {page.name for page in PAGES} - {"README.md"}
    assert pages == listed | {"index.md"} == of_the_site


@cache
def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of the page may say after the #, as GitHub and MkDocs make it."""
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"(?m)^#+ (.*)", prose))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


#: Building it takes longer than all that it parses here.
parser = cache(cli.build_parser)


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_every_command_of_a_page_is_one(page: str, command: str) -> None:
    argv = shlex.split(command)[1:]
    if "--" in argv:
        argv = argv[: argv.index("--")]
    if "--help" in argv:
        return
    if "--on" in argv:  # a login node, before any command
        del argv[argv.index("--on") : argv.index("--on") + 2]
    args = parser().parse_args(argv)
    config = getattr(args, "config", None)
    if args.command == "sweep" and config.startswith("configs/"):
        if args.optuna is not None:
            pytest.importorskip("optuna")
        options = Options(**{each.name: getattr(args, each.name) for each in fields(Options)})
        assert submission.check(request.read(ROOT / config, args.overrides, options), ROOT, "slurm")
    elif config and (ROOT / config).is_file() and config.startswith("configs/"):
        validate(load_config(ROOT / config, args.overrides, site=False))


#: Files of the user in the pages, which are not files of the project.
USERS_FILES = {"train.py", "train.yaml", "site.yaml", "models.py", "random.py", "submitit.py", "mine.py", "base.yaml"}
#: Functions of torch, accelerate and DeepSpeed that the pages call without naming the module, and a block of a model.
OTHERS_FUNCTIONS = {
    *("Accelerator", "DefaultLoadPlanner", "SummaryWriter", "get_state_dict", "init_distributed"),
    "AdamW",
    "abort",
    "block",
    "eval",
    "init_process_group",
    "list_keys",
    "new_group",
    "requires_grad_",
}


def quoted(page: Path, pattern: str) -> list[tuple[str, ...]]:
    """Return the groups of ``pattern`` in the page's prose between backticks.

    A piece counts if it matches as a whole.
    """
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    matches = (re.fullmatch(pattern, piece.strip()) for piece in re.findall(r"`([^`]+)`", prose))
    return [match.groups() for match in matches if match]


@cache
def files_by_name() -> Mapping[str, list[Path]]:
    found: dict[str, list[Path]] = {path.name: [path] for path in ROOT.glob("*.*")}
    for part in ("toolkit", "tests", "jobs", "configs", "sbatch", "docs"):
        for path in (ROOT / part).rglob("*.*"):
            found.setdefault(path.name, []).append(path)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A path is below the project or toolkit/. A name alone may be that of any file."""
    for (name,) in quoted(page, r"([\w./*-]+\.(?:py|yaml|sh|toml))"):
        if "/" not in name:
            assert name in files_by_name() or name in USERS_FILES or re.match(r"config\b", name), name
        elif not name.startswith(("./", "/", "~")):
            assert [*ROOT.glob(name), *(ROOT / "toolkit").glob(name)], name
    for (folder,) in quoted(page, r"((?:toolkit|tests|jobs|configs|sbatch|docs)/[\w/]*)"):
        assert (ROOT / folder).exists(), folder


@cache
def parsers() -> Mapping[str, argparse.ArgumentParser]:
    [found] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return cast(Mapping[str, argparse.ArgumentParser], found.choices)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_a_page_names_is_known(page: Path) -> None:
    for command, rest in quoted(page, r"toolkit\s+([a-z][\w-]*)\b(?!\.)(.*)"):
        assert command in parsers(), command
        options = re.findall(r"(?<=[\s\[|])--[a-z-]+", rest.partition(" -- ")[0])
        known = parsers()[command]._option_string_actions.keys() | {"--on"}
        assert set(options) <= known, f"toolkit {command}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_the_config_that_a_page_names_is_one(page: Path) -> None:
    keys = set(all_keys())
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    for (key,) in quoted(page, rf"((?:{sections})\.[a-z_.]+)(?:[:=].*)?"):
        if key in USERS_FILES or key.endswith((".json", ".safetensors")):
            continue
        # A section, or an entry of a mapping such as cluster.extra.
        parts = [".".join(key.split(".")[:length]) for length in range(2, key.count(".") + 2)]
        assert keys & set(parts) or any(known.startswith(f"{key}.") for known in keys), key


#: Patterns that a native reader stumbles over; `beside` and `behind` are for places in space.
GONE = re.compile(
    r"\b(goes on|go on|mend(s|ed)?|is no (?!longer|more)\w+|beside|behind|of now|told|made again|"
    r"the plugin (?!that)\w+)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_written_without_private_patterns(page: Path) -> None:
    prose = " ".join(re.sub(r"(?s)```.*?```|`[^`]*`|<!--.*?-->", "", page.read_text()).split())
    assert [prose[max(0, m.start() - 40) : m.end() + 20] for m in GONE.finditer(prose)] == []


def newest_torch() -> tuple[int, int]:
    """Return the version of the lock file, which the pages are written for."""
    found = re.search(r"(?m)^torch==(\d+)\.(\d+)", (ROOT / "requirements.lock").read_text())
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_name_of_python_on_a_page_exists(page: Path) -> None:
    for (name,) in quoted(page, r"((?:toolkit|torch|jobs|tests)\.[A-Za-z_.]+)(?:\(.*\))?"):
        if not (name.startswith("torch.") and torch_version.is_before(newest_torch())):
            pkgutil.resolve_name(name)
    for (module,) in quoted(page, r"python -m ((?:toolkit|tests)[\w.]*)\b.*"):
        assert importlib.util.find_spec(module), module


@cache
def functions() -> set[str]:
    sources = (path.read_text() for name, paths in files_by_name().items() if name.endswith(".py") for path in paths)
    return {name for source in sources for name in re.findall(r"(?:def|class) (\w+)", source)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_that_a_page_names_exists(page: Path) -> None:
    for (name,) in quoted(page, r"(?:\w+\.)?(\w+)\([^()]*\)"):
        assert name in functions() | OTHERS_FUNCTIONS or hasattr(builtins, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(textwrap.dedent(block), page.name, "exec")


def configs() -> Iterator[tuple[str, str]]:
    """Yield each config in the pages' blocks. A block that has a section twice shows one config for each."""
    for page in PAGES:
        for block in blocks(page, "yaml"):
            first = block.partition(":")[0]
            yield from ((page.stem, part) for part in re.split(rf"(?m)^(?={first}:)", block) if part)


#: Where weights are that docs/images.md names.
WEIGHTS = "data/weights/ResNet50_Weights.IMAGENET1K_V2.pth"


@pytest.mark.parametrize(("page", "config"), list(configs()))
def test_every_config_of_a_page_is_valid(
    page: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (ROOT / "configs").glob("*.yaml"):  # what it may extend
        (tmp_path / other.name).write_text(other.read_text())
    for name in (
        "scratch/imagenet/train/dog/1.jpg",
        "scratch/imagenet/val/dog/2.jpg",
        "images/torch-2.15.sif",
        WEIGHTS,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name, secret in ((".hf_token", "hf_123"), (".slack-hook", "https://hooks.example.org/T0")):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(secret)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "123")
    for name in ("mlflow.py", "wandb.py"):  # trackers, which `trackers:` wants installed
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    declared = blocks(f"docs/{page}.md", "python") if "job:" in config else []
    (tmp_path / "train.py").write_text("".join(declared[:1]) + "\n\ndef main(config): print(config)\n")
    (tmp_path / "shown.yaml").write_text(re.sub(r"/(scratch|images)/", rf"{tmp_path}/\1/", config))
    monkeypatch.chdir(tmp_path)
    size = [] if "cluster:" in config else ["cluster.tasks_per_node=4"]
    validate(load_config("shown.yaml", size, site=False, sweep="sweep:" in config))
    if "sweep:" in config:
        assert submission.check(request.read("shown.yaml", [], Options()), ROOT, "slurm")


def test_the_page_on_gpus_has_the_figures_of_the_kept_record() -> None:
    record = json.loads((ROOT / "docs/gpu-figures.json").read_text())
    page = " ".join((ROOT / "docs/gpu.md").read_text().split())
    about, tests = record["machine"], record["tests"]
    assert {test["outcome"] for test in tests} == {"passed"}
    assert f"**all {len(tests)} tests passed**" in page
    assert about["revision"] in page
    assert f"one {about['gpus'][0]}," in page
    races = [test["figures"] for test in tests if "ours_of_bare" in test["figures"]]
    assert len(races) == 3
    (save,) = [test["figures"] for test in tests if "of_plain" in test["figures"]]
    assert f"({save['plain_GB_per_s']:.1f} GB a second) | {save['of_plain']:.3f} |" in page
    (copied,) = [test["figures"]["host_s"] for test in tests if "host_s" in test["figures"]]
    assert f"| {copied * 1000:.1f} ms |" in page
    (lap,) = [test["figures"]["host_us_per_lap"] for test in tests if "host_us_per_lap" in test["figures"]]
    assert f"| {lap:.0f} us |" in page
    for race in races:
        row = f"{race['bare_samples_per_s']:.4g} | {race['ours_samples_per_s']:.4g} | {race['ours_of_bare']:.3f}"
        assert f" | {row} | {race['mfu']:.3f} |" in page if "mfu" in race else f" | {row} | |" in page
