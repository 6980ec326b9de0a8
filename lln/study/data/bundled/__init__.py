"""The text that comes with the package: Tiny Shakespeare, public domain, 1.1 million characters.

Demos and tests read it, so that nothing outside the installation is needed. A wheel has its first
seventh alone, under another name, since the whole text would be a third of it.
"""

from __future__ import annotations

import bz2
import functools
import lzma
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

WHOLE, EXCERPT = "tinyshakespeare", "tinyshakespeare_excerpt"
PACKED = {WHOLE: ("xz", lzma.decompress), EXCERPT: ("bz2", bz2.decompress)}  # bz2: 12 % smaller


@functools.cache
def name() -> str:
    """Return the name of the text that is here, for rows: the whole, or its excerpt."""
    return WHOLE if _file(WHOLE).is_file() else EXCERPT


def text() -> str:
    """Return Tiny Shakespeare, in an installed wheel its first seventh.

    Example:
        >>> text()[:14]
        'First Citizen:'
    """
    _, unpack = PACKED[name()]
    return unpack(_file(name()).read_bytes()).decode("utf-8")


def _file(name: str) -> Traversable:
    return resources.files(__name__).joinpath(f"{name}.txt.{PACKED[name][0]}")
