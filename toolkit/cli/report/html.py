"""HTML in which every text is escaped: only what :func:`element` returns is markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from toolkit.terminal import visible

#: Characters that HTML does not allow, and that a terminal does.
_UNFIT = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")


class Html(str):
    """Markup."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return ``value`` as markup: unchanged if it is markup, else escaped."""
    if isinstance(value, Html):
        return value
    plain = _UNFIT.sub("\ufffd", visible(str(value))).encode(errors="replace").decode()
    return Html(html.escape(plain, quote=True))


def join(parts: Iterable[object]) -> Html:
    """Return the parts one after another."""
    return Html("".join(map(text, parts)))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element. Of an attribute's name a last ``_`` is dropped, and others become ``-``; None is left out."""
    words = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{words}>{join(children)}</{tag}>")


def table(caption: str, head: Iterable[object], rows: Iterable[Iterable[object]], **attributes: object) -> Html:
    """Return a table whose first column names the rows. It scrolls by itself, also by the keyboard."""
    lines = []
    for first, *rest in rows:
        lines.append(element("tr", element("th", first, scope="row"), *map(cell, rest)))
    names = [element("th", name, scope="col") for name in head]
    top = element("thead", element("tr", *names))
    body = element("table", element("caption", caption), top, element("tbody", *lines), **attributes)
    return element("div", body, class_="scroll", tabindex=0, role="region", aria_label=caption)


def cell(value: object) -> Html:
    """Return a cell; markup of a cell is taken as it is."""
    return value if isinstance(value, Html) and value.startswith("<td") else element("td", value)
