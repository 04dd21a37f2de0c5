"""README.md and docs/ as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path | str, language: str) -> list[str]:
    """What stands between the fences of this language, in the page's order."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def console_lines(block: str) -> list[str]:
    """The commands of a ``console`` block, each with the lines that continue it."""
    return re.findall(r"^\$ (.*(?:\\\n.*)*)", block, re.MULTILINE)
