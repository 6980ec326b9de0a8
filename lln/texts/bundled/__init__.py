"""The text that comes with the package: Tiny Shakespeare, public domain, 1.1 million characters.

Demos and tests read it, so that nothing outside the installation is needed.
"""

from __future__ import annotations

import lzma
from importlib import resources

NAME = "tinyshakespeare"


def text() -> str:
    """Return Tiny Shakespeare.

    Example:
        >>> text()[:14]
        'First Citizen:'
    """
    packed = resources.files(__name__).joinpath(f"{NAME}.txt.xz").read_bytes()
    return lzma.decompress(packed).decode("utf-8")
