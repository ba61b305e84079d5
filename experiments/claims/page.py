"""A page written once, as Markdown and as HTML with tables that a click sorts; it opens from disk.

A page is a list of blocks. Their words may have `code` and [links](target).
"""

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Heading(NamedTuple):
    """A heading with a place to link to."""

    words: str
    level: int = 2
    name: str = ""


class Text(NamedTuple):
    """A paragraph."""

    words: str


class Table(NamedTuple):
    """A table of words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Figure(NamedTuple):
    """A picture."""

    file: str  # from the folder of the page
    says: str  # what it shows, for who cannot see it


class Folded(NamedTuple):
    """Blocks that a click unfolds."""

    title: str
    blocks: Sequence["Block"]
    name: str = ""  # to link to


Block = Heading | Text | Table | Figure | Folded


def markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown."""
    return "\n\n".join(map(_markdown, blocks))


def _markdown(block: Block) -> str:
    match block:
        case Heading(words, level, name):
            return (f'<a id="{name}"></a>\n\n' if name else "") + f"{'#' * level} {words}"
        case Table(columns, rows):
            lines = [columns, ["---"] * len(columns), *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
        case Figure(file, says):
            return f"![{says}]({file})"
        case Folded(title, inner, name):
            place = f'<a id="{name}"></a>\n\n' if name else ""
            return f'{place}<details markdown="1">\n<summary>{title}</summary>\n\n{markdown(inner)}\n\n</details>'
    return block.words


def html(blocks: Sequence[Block], title: str) -> str:
    """The page as one file of HTML. Its figures lie beside it; nothing else is read."""
    return _PAGE.replace("TITLE", escape(title)).replace("BODY", "\n".join(map(_html, blocks)))


def _html(block: Block) -> str:
    match block:
        case Heading(words, level, name):
            return f'<h{level} id="{escape(name)}">{_inline(words)}</h{level}>'
        case Table(columns, rows):
            head = "".join(f'<th scope="col"><button>{_inline(column)}</button></th>' for column in columns)
            body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
            return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
        case Figure(file, says):
            return f'<img src="{escape(file)}" alt="{escape(says)}">'
        case Folded(title, inner, name):
            place = f' id="{escape(name)}"' if name else ""
            folded = "\n".join(map(_html, inner))
            return f"<details{place}><summary>{_inline(title)}</summary>\n{folded}\n</details>"
    return "\n".join(f"<p>{_inline(words)}</p>" for words in block.words.split("\n\n"))


def _inline(words: str) -> str:
    text = escape(words)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; --line: #8886 }
body { max-width: 72rem; margin: 1rem auto; padding: 0 1rem; font: 16px/1.45 system-ui, sans-serif }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line) }
th button { all: unset; cursor: pointer; font-weight: bold } th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " ▲" } th[aria-sort=descending] button::after { content: " ▼" }
h1 { font-size: 1.5rem; margin: .5rem 0 } p { margin: .7rem 0 }
img { max-width: 100%; max-height: 100vh; background: #fff } summary { cursor: pointer; padding: .3rem 0 }
</style>
BODY
<script>
"use strict";
const value = cell => {
  const number = cell.textContent.replace("−", "-").match(/^\\D{0,2}?([-+]?\\d+(\\.\\d+)?)/);
  return number ? Number(number[1]) : cell.textContent;
};
for (const head of document.querySelectorAll("th")) head.firstChild.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending", body = head.closest("table").tBodies[0];
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = (a, b) => {
    const [x, y] = [a, b].map(row => value(row.cells[head.cellIndex]));
    const less = typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1;
    return up ? less : -less;
  };
  body.append(...[...body.rows].sort(order));
});
const unfold = () => document.querySelector(location.hash || null)?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
if (location.hash) unfold();
</script>
</html>
"""
