"""Pages of HTML that need nothing else: one style, tables, bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em;max-width:1500px}table{border-collapse:collapse;margin:1em 0}"
    "th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}svg,img{max-width:100%;height:auto}"
    ".note{color:#666}"
)


def page(title: str, body: Iterable[str], *, style: str = "") -> bytes:
    """The whole file. `body`: lines of HTML."""
    head = f"<title>{escape(title)}</title><style>{STYLE}{style}</style>"
    lines = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{head}',
        f"</head><body><h1>{escape(title)}</h1>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(lines).encode("utf-8", "backslashreplace")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table of texts. No titles: it has none."""
    return ["<table>", *([row("th", titles)] if titles else []), *(row("td", cells) for cells in rows), "</table>"]


def row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
