"""Fills in the generated parts of the pages while mkdocs builds them."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.page import filled
from tests.pages import ROOT


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return a page as it is built: mkdocs calls this by its name. The first page begins with the README's pitch."""
    if page.file.src_uri == "index.md":
        pitch = (ROOT / "README.md").read_text().partition("\n## ")[0].replace("](docs/", "](")
        markdown = pitch + markdown.replace("\n## ", "\n### ").replace("# All pages", "\n## All pages", 1)
    return filled(markdown)
