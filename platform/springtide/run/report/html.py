"""Building blocks of self-contained HTML pages, which load no other file and follow the browser's light or dark mode."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from springtide.errors import printable

_STYLE = """
:root { --bg: #ffffff; --fg: #1f2937; --soft: #6b7280; --grid: #e5e7eb; --card: #f7f8fa; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0f1319; --fg: #e5e7eb; --soft: #9aa3b2; --grid: #2b3340; --card: #171d26; }
}
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, dt, .soft { color: var(--soft); } svg { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: .75rem; }
dl div { background: var(--card); border-radius: 8px; padding: .6rem .8rem; }
dt { font-size: .8rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .75rem; color: var(--soft); }
pre { background: var(--card); border-radius: 8px; padding: .8rem; overflow: auto; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--grid); padding: .25rem .5rem .25rem 0; }
td:first-child { color: var(--soft); white-space: nowrap; }
th { text-align: left; font-weight: 600; font-size: .8rem; padding: .25rem .5rem .25rem 0; }
figure { margin: 0; } figcaption { font-size: .85rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.charts.drawn { grid-template-columns: 100%; gap: .25rem; }
.charts.drawn svg { touch-action: pan-y; display: block; } .charts.drawn text { fill: var(--soft); font-size: 11px; }
.rule { stroke: var(--grid); } .hair { stroke: var(--fg); stroke-width: 1; } .curve { fill: none; stroke-width: 1.6; }
.curve.faint { stroke-width: .8; opacity: .6; }
.mark { stroke: #dc6803; stroke-dasharray: 2 3; opacity: .4; } .mark.bad { stroke: #dc2626; }
.key { margin-left: .8rem; white-space: nowrap; } output { font-variant-numeric: tabular-nums; }
.key::before { content: ""; display: inline-block; width: .6rem; height: .6rem; margin-right: .3rem; border-radius: 2px;
  background: var(--key); }
#controls { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; position: sticky; top: 0; background: var(--bg);
  margin: .5rem 0; }
#note { flex-basis: 100%; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.wide { overflow-x: auto; overflow-wrap: normal;
  background: linear-gradient(to right, var(--bg), var(--bg)) 0 / 1.2rem 100% no-repeat local,
    linear-gradient(to left, var(--bg), var(--bg)) 100% / 1.2rem 100% no-repeat local,
    linear-gradient(to right, var(--soft), transparent) 0 / .6rem 100% no-repeat scroll,
    linear-gradient(to left, var(--soft), transparent) 100% / .6rem 100% no-repeat scroll; }
.wide table { font-size: .85rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.best td { font-weight: 600; color: var(--fg); } a { color: inherit; }
.switch > .on, .switch > input:checked ~ .off { display: none; } .switch > input:checked ~ .on { display: block; }
.noted:hover path + path { stroke-width: 3.5 !important; opacity: 1 !important; stroke-opacity: 1 !important; }
"""


class Link(NamedTuple):
    """A table cell that links to another page."""

    text: str
    path: str
    """Path of the other page, relative to the page with the link."""


Cell = str | Link


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    # prefix "./": in a path such as "a:b", the browser would take "a" for a URL scheme
    return f'<a href="./{html.escape(quote(cell.path))}">{html.escape(cell.text)}</a>'


def page(title: str, sections: Iterable[str], script: str = "") -> str:
    """Return a whole HTML page as text.

    Args:
        title: title and heading of the page.
        sections: HTML of each section.
        script: JavaScript of the page, ASCII. The page's security policy forbids all other scripts.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    meta += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    run = f"<script>{script}</script>" if script else ""
    head = f"{meta}<title>{html.escape(title)}</title><style>{_STYLE}</style>{run}"
    heading = f"<h1>{html.escape(title)}</h1>"
    body = f"<body>{heading}{''.join(sections)}</body>"
    return printable(f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n')


def data_block(json: str) -> str:
    """Return an invisible HTML element with the data that the page's script reads. ``json``: the data, ASCII only."""
    for character in "<>&":  # escape these, so that a text in the data cannot end the element and inject HTML
        json = json.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="data">{json}</script>'


def more(hidden: int) -> str:
    """Return the HTML of a line such as "and 12 more", the number of hidden table rows; empty if none is hidden."""
    return f'<p class="soft">and {hidden:,} more</p>' if hidden > 0 else ""


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return the HTML of headline boxes: one box for each (label, figure, remark)."""
    texts = (tuple(map(html.escape, figure)) for figure in figures)
    return f"<dl>{''.join(f'<div><dt>{a}</dt><dd>{b}<small>{c}</small></dd></div>' for a, b, c in texts)}</dl>"


def table(title: str, rows: Iterable[tuple[str, Cell]]) -> str:
    """Return an HTML table of (key, value) rows. It has a heading if ``title`` is not empty."""
    lines = (f"<tr><td>{html.escape(key)}</td><td>{_cell(value)}</td></tr>" for key, value in rows)
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    return f"{heading}<table>{''.join(lines)}</table>"


def switch(name: str, label: str, off: str, on: str) -> str:
    """Return the HTML of a check box that switches between two sections, without a script.

    Args:
        name: id of the check box, unique in the page.
        label: text next to the check box.
        off: HTML that is shown first.
        on: HTML that is shown while the box is checked.
    """
    box = f'<input type="checkbox" id="{name}" /><label for="{name}"> {html.escape(label)}</label>'
    return f'<div class="switch">{box}<div class="off">{off}</div><div class="on">{on}</div></div>'


def grid(title: str, columns: Sequence[tuple[str, bool]], rows: Iterable[tuple[Sequence[Cell], bool]]) -> str:
    """Return the HTML of a heading and a table. ``columns``: (heading, True if the column holds numbers) of each column;
    ``rows``: (cells, True if the row is highlighted as the best one) of each row."""
    kinds = [' class="number"' if is_number else "" for _, is_number in columns]
    heads = "".join(f"<th{kind}>{html.escape(name)}</th>" for kind, (name, _) in zip(kinds, columns, strict=True))
    lines = []
    for row, is_best in rows:
        cells = "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f'<tr class="best">{cells}</tr>' if is_best else f"<tr>{cells}</tr>")
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<h2>{html.escape(title)}</h2><div class="wide"><table>{body}</table></div>'


def text(title: str, body: str) -> str:
    """Return the HTML of a heading and preformatted text."""
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(body)}</pre>"
