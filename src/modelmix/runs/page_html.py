"""HTML that cannot be broken out of: whatever is not ``Html`` already is escaped when it is put into a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5b6670; --paper: #ffffff; --card: #f4f6f8; --line: #d5dbe0;
  --warn-ink: #7a1010; --warn: #fdecea; --warn-line: #c62828; --box: #fff8e6; --box-line: #b7791f; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #a3adb7; --paper: #14181c; --card: #1f252b; --line: #39424b;
    --warn-ink: #ffd9d6; --warn: #4a1515; --warn-line: #ef5350; --box: #2b2413; --box-line: #d9a441; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
p, ul { margin: .4rem 0; }
ul { padding-left: 1.3rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.banner { margin: 1rem 0; padding: .8rem 1rem; border: 2px solid var(--warn-line); border-radius: .5rem;
  background: var(--warn); color: var(--warn-ink); font-weight: 600; }
.banner ul { font-weight: 400; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.fact { padding: .7rem 1rem; background: var(--card); border-radius: .5rem; }
.fact .value { font-size: 1.5rem; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: .8rem; }
figure { margin: .6rem 0 0; padding: .6rem; background: #ffffff; border: 1px solid var(--line); border-radius: .5rem; }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  font-weight: 400; }
td:only-of-type { overflow-wrap: anywhere; }
thead th { color: var(--soft); font-size: .9rem; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.ours th, .ours td { font-weight: 650; }
.box { margin-top: 2.2rem; padding: .2rem 1rem 1rem; border: 2px dashed var(--box-line); border-radius: .5rem;
  background: var(--box); }
.box h2 { margin-top: .8rem; }
.box .mark { font-weight: 600; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--card);
  padding: .1em .3em; border-radius: .25em; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  .banner, .fact, .box, figure { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2, h3 { break-after: avoid; }
  .fact, .banner, .box, figure, tr { break-inside: avoid; } }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: object, kind: str = "", scope: str = "") -> Html:
    """An element; ``kind`` is its class. Children that are not Html are escaped."""
    attributes = f' class="{escape(kind)}"' if kind else ""
    attributes += f' scope="{escape(scope)}"' if scope else ""
    return Html(f"<{name}{attributes}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Html:
    """Pieces one after the other, escaped where they are not Html."""
    return Html("".join(child if isinstance(child, Html) else escape(str(child)) for child in children))


def coded(text: str) -> Html:
    """Text in which `backquotes` mark code."""
    return joined(tag("code", part) if i % 2 else part for i, part in enumerate(text.split("`")))


def bullets(lines: Iterable[str]) -> Html:
    """A list of plain lines."""
    return tag("ul", *(tag("li", line) for line in lines))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = (), ours: int = -1
) -> Html:
    """A table that scrolls where it is too wide. The first cell of a row names it; row ``ours`` stands out."""

    def kind(i: int) -> str:
        return "number" if i in numbers else ""

    head = (
        [tag("tr", *(tag("th", name, kind=kind(i), scope="col") for i, name in enumerate(columns)))] if columns else []
    )
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", kind=kind(0)),
            *(tag("td", cell, kind=kind(i)) for i, cell in enumerate(row[1:], start=1)),
            kind="ours" if index == ours else "",
        )
        for index, row in enumerate(rows)
    ]
    return tag("div", tag("table", *(tag("thead", row) for row in head), tag("tbody", *body)), kind="scroll")


def document(title: str, *body: Html) -> Html:
    """A whole page that loads nothing from elsewhere."""
    head = joined(
        [
            Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Html('<meta name="referrer" content="no-referrer">\n'),
            tag("title", title),
            Html(f"\n<style>{STYLE}</style>\n"),
        ]
    )
    main = tag("main", *(Html(f"\n{part}\n") for part in body))
    return Html(f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{main}\n</body>\n</html>\n')
