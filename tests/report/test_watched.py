"""The picture of a monitor's rows: a line per layer, a panel per measure that was taken."""

from __future__ import annotations

import sys

import pytest

from lln.report import watched
from lln.report.watched import draw_monitor

HEAD = {"layer": 0, "head": 0, "entropy": 3.0, "spectral_gap": None}
ROWS = [
    {"step": 0, **HEAD},
    {"step": 0, **HEAD, "head": 1, "entropy": 5.0},
    {"step": 0, **HEAD, "layer": 1, "entropy": 7.0},
    {"step": 0, "gradient_norm": 2.0},
    {"step": 20, **HEAD},
    {"step": 20, **HEAD, "layer": 1, "entropy": None},
]


def test_a_line_is_the_mean_of_the_heads_of_a_layer():
    curves = watched._curves(ROWS, "entropy")
    assert [(curve.label, curve.x, curve.y) for curve in curves] == [
        ("layer 0", [0, 20], [4.0, 3.0]),
        ("layer 1", [0], [7.0]),
    ]


def test_what_was_not_measured_has_no_panel(tmp_path):
    svg = draw_monitor(ROWS).save(tmp_path / "new" / "watched.svg").read_text("utf-8")
    assert all(words in svg for words in ("Entropy of a row", "Gradient norm", "layer 1"))
    assert "Spectral gap" not in svg and "Temperature" not in svg
    assert draw_monitor(ROWS).save(tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert draw_monitor(ROWS)._repr_svg_() == svg


def test_bad_input_is_explained(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no row of a layer; pass the list of"):
        draw_monitor([{"step": 0, "gradient_norm": 1.0}])
    with pytest.raises(ValueError, match=r"write \.svg or \.png"):
        draw_monitor(ROWS).save(tmp_path / "watched.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lln-attention\[report\]'"):
        draw_monitor(ROWS)
