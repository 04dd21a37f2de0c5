"""README.md and docs/ as tests read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path | str, language: str) -> list[str]:
    """What stands between the fences of this language, in the page's order."""
    return re.findall(
        rf"^ *```{language}(?: title=.*)?\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


def console_lines(block: str) -> list[str]:
    """The commands of a ``console`` block, each with the lines that continue it."""
    return re.findall(r"^\$ (.*(?:\\\n.*)*)", block, re.MULTILINE)


def changed(text: str, diff: str) -> str:
    """Return ``text`` with the hunks of ``diff``, as ``diff -u`` prints them."""
    for hunk in re.split(r"(?m)^@@.*\n", diff)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] or line for line in lines if not line.startswith("+"))
        after = "".join(line[1:] or line for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, hunk
        text = text.replace(before, after)
    return text


def story(text: str) -> str:
    """Return what the reader of a text does from its beginning to its end, as lines for a shell.

    A block with a title is saved as that file, a diff changes the file, and what a console shows is typed. Of the
    commands of make, one has made the environment that this runs in, and the other the cluster.
    """
    typed, files = ["set -eux"], dict[str, str]()
    for language, name, block in re.findall(r'(?ms)^```(\w+)(?: title="(\S+)")?\n(.*?)^```', text):
        if language == "console":
            typed += [line for line in console_lines(block) if not line.startswith("make ")]
        elif name:
            files[name] = changed(files[name], block) if language == "diff" else block
            typed.append(f"cat > {name} <<'END'\n{files[name]}END")
    return "\n".join(typed)
