"""Whether a mechanism and its options exist, known before any data are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lln import zoo
from lln.study.tasks.models import softmax


def check(attention: str, options: Mapping[str, Any]) -> None:
    """Refuse a name that is not in the zoo, and options that the mechanism does not have.

    Values are looked at when the model is built.
    """
    names = [*dict.fromkeys((*softmax.NAMES, *zoo.list_mechanisms()))]
    if attention not in names:
        raise zoo.unknown_name("attention", attention, names)
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} is no set of names and values, such as diag_block=32")
    known = zoo.describe("softmax" if attention in softmax.NAMES else attention).defaults
    for option in options:
        if option not in known:
            raise TypeError(
                f"{option}= is not an option; {attention!r} takes {', '.join(known) or 'none'}"
            )
