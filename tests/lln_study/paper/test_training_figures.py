"""Figures 1, 8a and 8b from curves: which runs are compared, and what is drawn."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from lln.nn import RECOMMENDED
from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel, as_files
from lln_study.paper.figures import from_rows
from lln_study.paper.figures.from_curves import FIGURES
from lln_study.paper.results import read_curves

SIZES = {"layers": 2, "width": 64, "heads": 1, "length": 128, "batch_size": 4, "corpus": "wiki"}


def line(rows, *, seed=0, **configuration):
    settings = {"recipe": "roberta-small", "precision": "bf16", "attention": "softmax", **SIZES}
    settings |= configuration
    return {
        "subject": "mlm",
        "mechanism": settings["attention"],
        "digest": "0",
        "seed": seed,
        "configuration": settings,
        "rows": rows,
    }


def curve(last: float, steps: int = 3, scale: float | None = None) -> list[dict]:
    rows = [{"kind": "eval", "step": 0, "loss": 9.0, "tokens": 0, "seconds": 0.0}]
    for step in range(1, steps + 1):
        place = {"step": step, "tokens": 512 * step, "seconds": 0.1 * step}
        loss = 9 - (9 - last) * step / steps
        rows.append({"kind": "train", **place, "loss": loss, "loss_scale": scale})
        rows.append({"kind": "eval", **place, "loss": loss})
    return rows


def monitored() -> list[dict]:
    return [
        {"step": step, "layer": layer, "head": 0, "temperature": 1.0 + step, "entropy": 5.0 - layer}
        | {"spectral_gap": 0.5}
        for step in (0, 50)
        for layer in (0, 1)
    ]


def drawn(name, lines):
    return FIGURES[name].panels(lines)


def test_figure_1_has_a_curve_per_layer_and_three_panels_per_attention():
    lines = [
        line(monitored(), recipe="figure-1", attention="lln_diag"),
        line(monitored(), recipe="figure-1"),
        line(monitored()),  # another recipe
        line(curve(3.0), recipe="figure-1"),  # the loss of the run, not its heads
    ]
    panels = drawn("1", lines)
    assert [panel.title for panel in panels] == [
        f"{what}, {name}"
        for name in ("Softmax", "LLN+Diag")
        for what in ("Temperature", "Entropy", "Spectral gap 1 − |λ₂|")
    ]
    layers = panels[1].curves
    assert [each.label for each in layers] == ["layer 1", "layer 2"]
    assert list(layers[1].x) == [0, 50] and list(layers[1].y) == [4.0, 4.0]


def test_figure_8a_compares_equals_at_their_best_rate():
    lines = [
        line(curve(5.0, 9), learning_rate=1e-3),
        line(curve(4.0, 9), learning_rate=5e-4, seed=1),
        line(curve(4.5, 9), learning_rate=5e-4),
        line(curve(3.5, 9), attention="lln_diag", learning_rate=1e-3),
        line(curve(3.4, 9), attention="lln_diag", options={"method": "entropy"}),
        line(curve(1.0, 3), attention="lln_diag", length=64),  # other rows, fewer tokens
        line(curve(1.0, 99), attention="lln", length=256),  # longest, with nothing to compare
        line(curve(1.0, 9, scale=8.0), attention="lln_diag", precision="fp16"),
    ]
    panels = drawn("8a", lines)
    assert [panel.title for panel in panels] == [
        "Training loss",
        "Validation loss up to 5.1",
        "Validation loss against time",
    ]
    ends = {each.label: each.y[-1] for each in panels[1].curves}
    wanted = {"Softmax": 4.5, "LLN+Diag": 3.5, "LLN+Diag (entropy)": 3.4}
    assert ends == pytest.approx(wanted)
    assert panels[2].curves[0].x[-1] == pytest.approx(0.9)


def test_figure_8a_shows_the_ends_of_curves_without_what_is_far_above():
    far = line(curve(7.0, 9), attention="lln")
    panel = drawn("8a", [line(curve(4.0, 9)), line(curve(3.0, 9), attention="lln_diag"), far])[1]
    assert panel.title == "Validation loss up to 4.5"
    assert panel.note.startswith("Always above: LLN. ")
    assert [each.label for each in panel.curves] == ["Softmax", "LLN+Diag"]
    assert all(0 < len(each.x) == len(each.y) for each in panel.curves)
    assert max(y for each in panel.curves for y in each.y) <= 4.5


def test_figure_8a_without_an_evaluation_shows_what_there_is():
    def unjudged(**changes):
        return line([row for row in curve(4.0, 9) if row["kind"] == "train"], **changes)

    panels = drawn("8a", [unjudged(), unjudged(attention="lln_diag")])
    assert panels[0].title == "Training loss" and len(panels[0].curves) == 2


def test_figure_8a_shows_longer_inputs_against_time():
    lines = [
        *(line(curve(4.0, 9), attention=name) for name in ("softmax", "lln_diag")),
        *(line(curve(5.0, 3), attention=name, length=8192) for name in ("softmax", "lln_diag")),
        *(line(curve(1.0, 5), attention=name, length=64) for name in ("softmax", "lln_diag")),
    ]
    panels = drawn("8a", lines)
    assert [panel.title for panel in panels[2:]] == [
        "Validation loss against time",
        "Validation loss against time, N = 8,192",
    ]
    assert [each.y[-1] for each in panels[3].curves] == [5.0, 5.0]


def test_figure_8a_leaves_out_of_its_times_who_shared_a_device():
    alone, shared = line(curve(4.0)), {**line(curve(3.0), attention="lln_diag"), "shared": True}
    panels = drawn("8a", [alone, shared])
    assert [len(panel.curves) for panel in panels] == [2, 2, 1]
    assert panels[2].curves[0].label == "Softmax" and "shared" in panels[2].note
    assert len(drawn("8a", [{**alone, "shared": True}, shared])) == 2


def test_figure_8b_inverts_the_loss_scale():
    lines = [
        line(curve(5.0, scale=65536.0), precision="fp16"),
        line(curve(4.0, scale=16384.0), precision="fp16", attention="lln_diag"),
    ]
    panels = drawn("8b", lines)
    ends = {each.label: each.y[-1] for each in panels[0].curves}
    assert ends == {"Softmax": 2.0**-16, "LLN+Diag": 2.0**-14}


def test_figure_8b_draws_equal_curves_once():
    lines = [
        line(curve(5.0, scale=65536.0), precision="fp16"),
        line(curve(4.0, scale=65536.0), precision="fp16", attention="lln_diag"),
    ]
    panel = drawn("8b", lines)[0]
    assert [each.label for each in panel.curves] == ["Softmax = LLN+Diag"]


def test_figure_8a_names_a_few_lines_and_says_which_are_missing():
    kinds = [
        *((name, {}) for name in ("softmax", "block_diag", "lln", "lln_diag", "nystromformer")),
        ("softmax", {"conv": 33}),
        ("lln_diag", dict(RECOMMENDED)),
        ("lln_diag", {"conv": 33}),
    ]
    lines = [line(curve(4.0, 9), attention=name, options=options) for name, options in kinds]
    panel = drawn("8a", lines)[0]
    labels = [each.label for each in panel.curves]
    wanted = ["Softmax", "Softmax (conv 33)", "Diag", "LLN", "LLN+Diag", "LLN+Diag, recommended"]
    assert labels == wanted and all(each.named for each in panel.curves)
    assert panel.note.endswith(" Not drawn: Nyströmformer, LLN+Diag (conv 33).")


def test_what_is_named_at_its_line_is_not_in_the_legend():
    curves = [Curve("left", [1, 2], [1, 2], slot=0, named=True), Curve("low", [1, 2], [1, 1])]
    panel = Panel("P", [*curves, Curve("high", [1, 2], [3, 3])], Axis("x"), Axis("y"))
    svg = as_files("one", [replace(panel, span=(1.2, 1.4), span_label="shaded")])["svg"].decode()
    assert svg.count(">left<") == svg.count(">low<") == svg.count(">shaded<") == 1


def test_files_are_written_from_a_folder_of_results(tmp_path):
    lines = [line(curve(5.0)), line(curve(4.0), attention="lln_diag")]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (tmp_path / "curves.jsonl").write_text(text + '{"torn": ')
    (tmp_path / "mlm.jsonl").write_text('{"subject": "mlm", "digest": "0", "seed": 0}\n')
    assert len(read_curves(tmp_path)) == 2
    written = from_rows.draw("8a", tmp_path, tmp_path / "out")
    assert [path.name for path in written] == ["figure_8a.csv", "figure_8a.svg", "figure_8a.png"]
    with written[0].open() as stream:
        assert {row["curve"] for row in csv.DictReader(stream)} == {"Softmax", "LLN+Diag"}


@pytest.mark.parametrize("name", ["1", "8a", "8b"])
def test_without_curves_the_command_says_how_to_get_them(tmp_path, name):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    done = CliRunner().invoke(cli.app, ["figure", name, "--results", str(tmp_path)])
    assert done.exit_code == 1 and "lln sweep sweeps/" in done.output
