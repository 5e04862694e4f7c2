"""The picture of a plan: one HTML page that draws who sends which layers and heads to whom.

The page is complete in itself: style, script and data are inside, so that it opens from a file,
can be mailed, and asks no server for anything. All drawing is done by the template, `plan.html`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from kvferry.errors import DescriptionError
from kvferry.layout.shape import EngineShape
from kvferry.plan.report import PlanReport

PLACEHOLDER = "__PLAN_DATA__"
# Inside <script>, HTML ends the data at "</" and opens a comment at "<!--", whatever JSON says;
# U+2028 and U+2029 are line ends to older script parsers. As escapes all are plain JSON.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def plan_page(report: PlanReport, link_bytes_per_s: float | None) -> str:
    """A self-contained HTML page for `report`; with a link's rate it also shows the time."""
    # Ranks that carry nothing have no edge, so the page gets all ranks from the shapes.
    ranks = {
        "src": [list(rank) for rank in EngineShape.parse(report.src).ranks],
        "dst": [list(rank) for rank in EngineShape.parse(report.dst).ranks],
    }
    data = {**report.to_dict(link_bytes_per_s), "ranks": ranks}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    template = files("kvferry.cli").joinpath("plan.html").read_text(encoding="utf-8")
    before, _, after = template.partition(PLACEHOLDER)
    return before + text.translate(_ESCAPES) + after


def write_page(path: Path, page: str, what: str) -> None:
    """Keep a page in a file, whose folders are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DescriptionError(
            f"cannot write the {what} to {path}: {error.strerror}; name a file that can be written"
        ) from None
