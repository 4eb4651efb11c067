"""Pieces of a report's page: its style, tables, figures and cells. Everything returned is HTML."""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import figures
from experiments.headline import MAIN, known, number

Cell = str
STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d8dee4;--page:#fff;--wash:#f6f8fa;--mark:#e8f0fe;
--good:#1a7f37;--bad:#b35900}
@media(prefers-color-scheme:dark){:root{--ink:#dfe4ea;--soft:#939ba5;--line:#30363d;--page:#0f1318;--wash:#171c23;
--mark:#1b2a44;--good:#4ac26b;--bad:#e3944a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:68rem;padding:1.6rem 1.2rem 3rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.kind{margin:0;color:var(--soft);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase}
h1{margin:.1rem 0 .5rem;font-size:1.45rem;line-height:1.25;letter-spacing:-.01em;text-wrap:balance}
h1.better{color:var(--good)}h1.not-better{color:var(--bad)}
h2{margin:2rem 0 .5rem;font-size:1.05rem}
p{margin:.4rem 0;max-width:46rem}
.note,figcaption,footer{color:var(--soft);font-size:.85rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.2rem 1.6rem}
figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}
.wide .scroll svg{min-width:44rem}
figure svg{display:block;width:100%;height:auto;font-family:inherit}
figcaption{margin-top:.2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.84rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .42rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--soft);vertical-align:bottom;white-space:normal}
th:first-child,td:first-child{white-space:normal;text-align:left;padding-left:.4rem;
position:sticky;left:0;background:var(--page)}
details td:first-child,details th:first-child{background:var(--wash)}
tr.envsched td{background:var(--mark)}
td small{color:var(--soft);font-size:.9em}
table.narrow{width:auto;min-width:16rem}
details{margin:.8rem 0;border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem;background:var(--wash)}
summary{cursor:pointer;font-weight:600;font-size:.9rem}
details table{margin:.5rem 0}details.config td{white-space:normal;overflow-wrap:anywhere;text-align:left}
footer{margin-top:2rem;border-top:1px solid var(--line);padding-top:.6rem;overflow-wrap:anywhere}
"""


def spread(entry: Any, sign: bool = False, show: Callable[[float], str] = number) -> Cell:
    """Mean and interval of `{mean, ci}` (or of a bare number) for a table cell; a missing mean is a dash."""
    mean, ci = (entry.get("mean"), entry.get("ci")) if isinstance(entry, Mapping) else (entry, None)
    if mean is None:
        return "–"
    text = ("+" if sign and mean > 0 else "") + show(mean)
    return f"{text} <small>[{show(ci[0])}, {show(ci[1])}]</small>" if known(ci) else text


def table(headers: Sequence[str], rows: Mapping[str, Sequence[Cell]], look: str = "") -> str:
    """An HTML table with a row per arm; cells are HTML, names and headers are text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    lines = []
    for name, cells in rows.items():
        mark = ' class="envsched"' if name == MAIN else ""
        texts = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr{mark}><td>{html.escape(name)}</td>{texts}</tr>")
    data = "\n".join(lines)
    body = f"<thead><tr>{head}</tr></thead><tbody>\n{data}\n</tbody>"
    return f'<div class="scroll"><table class="{look}">{body}</table></div>'


def figure(path: Path, caption: str, wide: bool = False) -> str:
    """A figure element with the SVG that lies beside `path`."""
    svg, text = figures.inline_svg(path, caption), html.escape(caption)
    if not wide:
        return f"<figure>{svg}<figcaption>{text}</figcaption></figure>"
    # On a narrow screen its letters would be too small to read, so it keeps a width and is scrolled.
    return f'<figure class="wide"><div class="scroll">{svg}</div><figcaption>{text}</figcaption></figure>'


def panel(items: Sequence[str]) -> str:
    """Figures in a grid, as many beside each other as there is room for."""
    return f'<div class="figures">{"".join(items)}</div>' if items else ""
