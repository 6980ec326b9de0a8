"""The documentation as a site, ``make docs``: the pages of ``docs/``, and the API from the code."""

from __future__ import annotations

import re
from typing import Any

import lln

project = "lln"
author = "The lln developers"
release = version = lln.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"lln {release}"
myst_heading_anchors = 3
# links to files that are no page, such as results/; tests/test_docs.py checks that they exist
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"  # shapes and types beside each argument
autoclass_content = "class"  # constructors have no words of their own
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SECTION = re.compile(r"[A-Z]\w+:$")  # Args:, Returns:, Example: …, which napoleon reads
NOT_LITERAL = re.compile(r"([-*]|\d+\.) |.*::$")  # what follows is of the item, or literal already


def readable(docstring: list[str]) -> list[str]:
    """Docstrings are written to be read as text: indented formulas and code become literal blocks.

    Example:
        >>> readable(["The mean:", "    μ = Σ x / N", "of all."])
        ['The mean:', '', '::', '', '    μ = Σ x / N', '', 'of all.']
    """
    lines: list[str] = []
    literal = left_alone = False
    for line in docstring:
        indented = line.startswith(" ")
        if line.strip() and not indented:
            if literal:
                lines.append("")
            literal = False
            left_alone = bool(SECTION.match(line) or NOT_LITERAL.match(line))
        elif indented and not left_alone and not literal:
            lines += [*([""] if lines and lines[-1] else []), "::", ""]
            literal = True
        # outside of literal text a bar would begin a substitution
        lines.append(line if literal else line.replace("|", r"\|"))
    return lines


def contents(page: str) -> str:
    """The tables of contents of the site: each section of the start page with its links, in order.

    Example:
        >>> print(contents("# Title\n## Maths\n- [Numerics](numerics.md): exact"))
        ```{toctree}
        :caption: Maths
        :hidden:
        numerics
        ```
    """
    trees = []
    for section in page.split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        links = re.findall(r"\]\((?!\.\.)([\w/-]+)\.(?:md|rst)\)", text)
        trees.append("\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", *links, "```"]))
    return "\n\n".join(trees)


def setup(app: Any) -> None:
    def with_contents(app: Any, name: str, source: list[str]) -> None:
        if name == root_doc:
            source[0] += "\n" + contents(source[0])

    def rewrite(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = readable(lines)

    app.connect("source-read", with_contents)
    app.connect("autodoc-process-docstring", rewrite, priority=100)  # before napoleon
