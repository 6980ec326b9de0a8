"""One self-contained HTML page: text, tables and inline SVG; no script, no network.

A page is plain values, so whoever has numbers can make one::

    page = Page("Title", "What is seen here.", sections=[Section("First", [Text("...")])])
    html = render(page)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Text:
    """Paragraphs separated by empty lines; `words in backticks` become code."""

    body: str
    kind: ClassVar[str] = "text"

    @property
    def paragraphs(self) -> list[str]:
        return [" ".join(part.split()) for part in re.split(r"\n\s*\n", self.body.strip())]


@dataclass(frozen=True)
class Table:
    """A table that is ready to be shown, on a page, in a terminal, or as Markdown.

    Attributes:
        lines: Cells as they shall be read.
        title: With the scale and the data.
        notes: What one must know to read it.
        records: The same as objects, with configuration, seeds, device, versions and commit.
        words: How many columns hold words, from the left; the others hold numbers.
    """

    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()
    words: int = 1
    kind: ClassVar[str] = "table"

    def markdown(self) -> str:
        """Return the table as Markdown, for README and documentation."""
        rule = ["---"] * self.words + ["---:"] * (len(self.columns) - self.words)
        body = "\n".join(f"| {' | '.join(line)} |" for line in [self.columns, rule, *self.lines])
        notes = "\n".join(f"- {note}" for note in self.notes)
        return f"**{self.title}**\n\n{body}\n\n{notes}".rstrip()


@dataclass(frozen=True)
class Plot:
    """An ``<svg>`` element made by :mod:`lln.report`, and what to see in it."""

    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Plots:
    """Plots side by side where the window is wide enough, below each other elsewhere."""

    plots: Sequence[Plot]
    kind: ClassVar[str] = "plots"


Block = Text | Table | Plots


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """Everything on the page; ``facts`` are shown at its foot (device, versions, commit, seed)."""

    title: str
    lede: str
    sections: Sequence[Section] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def render(page: Page) -> str:
    """Return the page as HTML text."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("pages need jinja2: pip install 'lln-attention[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lln.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    return environment.get_template("page.html").render(page=page)


def _inline(text: str):
    """Escape, then turn `backticks` into code."""
    import markupsafe

    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped))
