"""Options we recommend, by place: one preset each, chosen by the name "recommended"."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from lln.ops.window.near import Near

#: The name that stands for a preset where a mechanism is asked for.
BY_PLACE = "recommended"
_TEXT = {"method": "entropy", "mix": "learned", "near": 128, "conv": 33}
_TRAINED = {
    "feature_map": "learned",
    "learn_scale": True,
    "statistics": "fixed",
    "method": "entropy",
    "sharpness": 0.6,
}
#: place -> the mechanism of the zoo it is for, and the options.
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # Of those tried on text the lowest loss for its time (docs/guide/which-setting.md).
        "encoder": ("lln_diag", _TEXT),
        # The same, causal; not compared with others yet.
        "decoder": ("lln_diag", {**_TEXT, "statistics": "running"}),
        # What lln.hf.convert begins with (docs/results/conversion.md).
        "convert-encoder": (
            "lln_nearfar",
            {"near": Near(128, joint=True), **_TRAINED, "center_keys": True},
        ),
        "convert-decoder": (
            "lln_nearfar",
            {"near": Near(128, overlap=128, sinks=4, joint=True), **_TRAINED},
        ),
    }
)


class Chosen(NamedTuple):
    """A preset with the options that were given beside it."""

    place: str
    mechanism: str
    options: dict[str, Any]

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"recommended for the place {self.place!r}: {self.mechanism}, {words}"


def choose(*, causal: bool, trained: bool = False, options: Mapping[str, Any]) -> Chosen:
    """The preset of a place; options that are given stand.

    Args:
        trained: Whether the model around it was trained with softmax.

    Example:
        >>> choose(causal=True, options={"near": 64}).place
        'decoder'
    """
    kind = "decoder" if causal else "encoder"
    place = f"convert-{kind}" if trained else kind
    mechanism, preset = PRESETS[place]
    return Chosen(place, mechanism, {**preset, **options})


def recommended(place: str = "encoder") -> dict[str, Any]:
    """Options we recommend for a place, as keyword arguments of the modules and of ``lln.create``.

    A model that is saved after :func:`lln.hf.replace` names the place in its config.json, and all
    options beside it: a later release may recommend others.

    Args:
        place: "encoder" or "decoder", LLN+Diag in a model that is trained from scratch;
            "convert-encoder" or "convert-decoder", near/far attention (``"lln_nearfar"``, one
            normaliser) in a model that was trained with softmax, as :func:`lln.hf.convert` has it.

    Example:
        >>> layer = LLNMultiheadAttention(512, 8, **recommended("encoder"))
    """
    if place not in PRESETS:
        close = difflib.get_close_matches(str(place), PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"place={place!r} is unknown; {hint}There are {', '.join(PRESETS)}")
    return dict(PRESETS[place][1])


def preset_of(mechanism: str, options: Mapping[str, Any]) -> str | None:
    """The place whose preset these options hold in full; None if there is none.

    Args:
        mechanism: Of the zoo, the one that the options are for.

    Example:
        >>> preset_of("lln_diag", {**recommended("encoder"), "dropout": 0.1})
        'encoder'
    """
    held = [
        place
        for place, (known, preset) in PRESETS.items()
        if known == mechanism
        and all(
            name in options and _same(mechanism, name, options[name], value)
            for name, value in preset.items()
        )
    ]
    return max(held, key=lambda place: len(PRESETS[place][1]), default=None)


def _same(mechanism: str, name: str, given: Any, value: Any) -> bool:
    """Whether an option is as a preset has it."""
    if name == "near":
        return _near(mechanism, given) == _near(mechanism, value)
    return type(given) is type(value) and given == value


def _near(mechanism: str, value: Any) -> Near | None:
    """The near field; "lln_nearfar" has one normaliser, whether it is said or not."""
    near = Near.read(value)
    return near and replace(near, joint=near.joint or mechanism == "lln_nearfar")


#: ``recommended("encoder")``, read-only.
RECOMMENDED: Mapping[str, Any] = MappingProxyType(recommended("encoder"))
