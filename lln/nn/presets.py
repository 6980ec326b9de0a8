"""Options we recommend, by task and version: a later experiment adds a version and changes none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lln.ops.window.near import Near

_CONVERTED = {
    "feature_map": "learned",
    "learn_scale": True,
    "statistics": "fixed",
    "method": "entropy",
    "sharpness": 0.6,
}
#: task -> version -> the mechanism of the zoo it is for, and the options.
PRESETS: Mapping[str, Mapping[int, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        # Of those tried on text the lowest loss and the best average over GLUE when each was added
        # (docs/results/language.md); 2 halves what 1 lacks to softmax and sees twice the near keys.
        "encoder": {
            version: (
                "lln_diag",
                {"method": "entropy", "mix": "learned", "near": block, "conv": 33},
            )
            for version, block in ((1, 128), (2, 256))
        },
        # What lln.hf.convert begins with (docs/results/conversion.md).
        "convert-encoder": {
            1: ("lln_nearfar", {"near": Near(128, joint=True), **_CONVERTED, "center_keys": True})
        },
        "convert-decoder": {
            1: ("lln_nearfar", {"near": Near(128, overlap=128, sinks=4, joint=True), **_CONVERTED})
        },
    }
)


def recommended(task: str = "encoder", version: int | None = None) -> dict[str, Any]:
    """Options we recommend for a task, as keyword arguments of the modules and of ``lln.create``.

    A version never changes. Give one where numbers must stay as they are; without it you get the
    newest, which a release may replace by a better one. A model that is saved after
    :func:`lln.hf.replace` names task and version in its config.json, and all options beside them.

    Args:
        task: "encoder", LLN+Diag in an encoder that is trained from scratch; "convert-encoder" or
            "convert-decoder", near/far attention (``"lln_nearfar"``) in a trained
            softmax model, as :func:`lln.hf.convert` does it.
        version: 1 or later; None takes the newest.

    Example:
        >>> layer = LLNMultiheadAttention(512, 8, **recommended("encoder", version=1))
    """
    if task not in PRESETS:
        close = difflib.get_close_matches(str(task), PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"task={task!r} is unknown; {hint}There are {', '.join(PRESETS)}")
    versions = PRESETS[task]
    number = max(versions) if version is None else version
    if number not in versions:
        known = ", ".join(map(str, versions))
        raise ValueError(f"version={version!r} of the preset {task!r} is unknown; there is {known}")
    return dict(versions[number][1])


def preset_of(mechanism: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Task and version of the preset that these options hold in full; None if there is none.

    Args:
        mechanism: Of the zoo, the one that the options are for.

    Example:
        >>> preset_of("lln_diag", {**recommended("encoder"), "dropout": 0.1})
        {'task': 'encoder', 'version': 2}
    """
    found: dict[str, Any] | None = None
    size = 0
    for task, versions in PRESETS.items():
        for version, (known, preset) in versions.items():
            held = known == mechanism and all(
                name in options and _same(mechanism, name, options[name], value)
                for name, value in preset.items()
            )
            if held and len(preset) >= size:
                found, size = {"task": task, "version": version}, len(preset)
    return found


def _same(mechanism: str, name: str, given: Any, value: Any) -> bool:
    """Whether an option is as a preset has it."""
    if name == "near":
        return _near(mechanism, given) == _near(mechanism, value)
    return type(given) is type(value) and given == value


def _near(mechanism: str, value: Any) -> Near | None:
    """The near field; "lln_nearfar" has one normaliser, whether it is said or not."""
    near = Near.read(value)
    return near and replace(near, joint=near.joint or mechanism == "lln_nearfar")


#: Version 1 of the preset "encoder", which stays what it is and is the quicker one; the newest is
#: what :func:`recommended` gives.
RECOMMENDED: Mapping[str, Any] = MappingProxyType(recommended("encoder", version=1))
