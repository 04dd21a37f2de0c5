"""README.md and docs/: short, linked, and what they show can be typed."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.cli import main as cli
from toolkit.config import load_config, validate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.S | re.M)


def commands() -> Iterator[tuple[str, str]]:
    """Each command of the toolkit in the pages' consoles, with the lines that continue it."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", block, re.M):
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
    args = cli._parser().parse_args(argv)
    config = getattr(args, "config", None)
    if config and (ROOT / config).is_file() and config.startswith("configs/"):
        validate(load_config(ROOT / config, args.overrides, site=False))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(textwrap.dedent(block), page.name, "exec")
