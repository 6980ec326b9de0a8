"""The HTML page: everything on it, everything escaped, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from lln.report.page import Page, Plot, Plots, Section, Table, Text, render

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Balance(HTMLParser):
    """Collects tags and words, and complains about an element closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def example() -> Page:
    svg = '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'
    return Page(
        "A <title>",
        "The lede with `code` & more.",
        sections=[
            Section("First", [Text("One\n  paragraph.\n\nAnother <b>.")]),
            Section(
                "Second",
                [
                    Plots([Plot(svg, "caption"), Plot(svg)]),
                    Table(["name", "value"], [["x", "1.0"], ["<y>", "2.0"]], title="numbers"),
                ],
            ),
        ],
        facts={"device": "a & b"},
    )


def parse(page: Page) -> tuple[str, Balance]:
    html = render(page)
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    return html, parser


def test_all_parts_are_on_the_page_and_the_markup_is_balanced():
    html, parser = parse(example())
    tags = [tag for tag, _ in parser.seen]
    assert tags.count("section") == 2 and tags.count("figure") == 2 and tags.count("svg") == 2
    assert tags.count("tr") == 3 and tags.count("figcaption") == 1
    assert "<p>One paragraph.</p>" in html and "<code>code</code> &amp; more" in html


def test_content_is_escaped():
    html, _ = parse(example())
    assert "<b>" not in html and "<y>" not in html
    assert "A &lt;title&gt;" in html and "a &amp; b" in html


def test_nothing_is_loaded_from_elsewhere():
    html, parser = parse(example())
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.seen}
    assert not re.search(r"https?://|@import|url\(", html)


def test_light_dark_narrow_and_print_are_served():
    html, parser = parse(example())
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    viewport = [attrs for tag, attrs in parser.seen if attrs.get("name") == "viewport"]
    assert viewport and "width=device-width" in viewport[0]["content"]


def test_section_links_resolve():
    _, parser = parse(example())
    links = {attrs["href"] for tag, attrs in parser.seen if tag == "a"}
    ids = {f"#{attrs['id']}" for _, attrs in parser.seen if "id" in attrs}
    assert links and links <= ids


def test_an_empty_page_is_fine():
    html, parser = parse(Page("Title", "Lede."))
    assert "<nav" not in html and "<footer" not in html
    assert "Title" in parser.words


def test_a_table_is_markdown_and_a_part_of_a_page_with_its_notes():
    table = Table(["", "a"], [["LLN", "1"]], "Title", ["A `note`."])
    assert table.markdown() == "**Title**\n\n|  | a |\n| --- | ---: |\n| LLN | 1 |\n\n- A `note`."
    assert "<p>A <code>note</code>.</p>" in render(Page("", "", [Section("", [table])]))
