"""README.md and docs/: short, linked, and what they show can be typed."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks, console_lines
from toolkit.cli import main as cli
from toolkit.config import load_config, validate


def commands() -> Iterator[tuple[str, str]]:
    """Each command of the toolkit in the pages' consoles, with the lines that continue it."""
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
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_every_command_of_a_page_is_one(page: str, command: str) -> None:
    argv = shlex.split(command)[1:]
    if "--" in argv:
        argv = argv[: argv.index("--")]
    if "--help" in argv:
        return
    args = cli.build_parser().parse_args(argv)
    config = getattr(args, "config", None)
    if config and (ROOT / config).is_file() and config.startswith("configs/"):
        validate(load_config(ROOT / config, args.overrides, site=False))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(textwrap.dedent(block), page.name, "exec")


def configs() -> Iterator[tuple[str, str]]:
    """Each config in the pages' blocks; where a block has a section twice, it shows one config for each."""
    for page in PAGES:
        for block in blocks(page, "yaml"):
            first = block.partition(":")[0]
            yield from ((page.stem, part) for part in re.split(rf"(?m)^(?={first}:)", block) if part)


@pytest.mark.parametrize(("page", "config"), list(configs()))
def test_every_config_of_a_page_is_valid(
    page: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (ROOT / "configs").glob("*.yaml"):  # what it may extend
        (tmp_path / other.name).write_text(other.read_text())
    for name in ("scratch/imagenet/train/dog/1.jpg", "scratch/imagenet/val/dog/2.jpg", "images/torch-2.15.sif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    declared = blocks(f"docs/{page}.md", "python") if "job:" in config else []
    (tmp_path / "train.py").write_text("".join(declared[:1]) + "\n\ndef main(config): ...\n")
    (tmp_path / "shown.yaml").write_text(re.sub(r"/(scratch|images)/", rf"{tmp_path}/\1/", config))
    monkeypatch.chdir(tmp_path)
    size = [] if "cluster:" in config else ["cluster.tasks_per_node=4"]
    validate(load_config("shown.yaml", size, site=False))
