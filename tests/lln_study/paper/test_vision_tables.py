"""Tables 3 to 5 and figures 9 and 10 from rows: right numbers in the right places."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln_study.paper.accuracy import at_best_rate
from lln_study.paper.figures import from_results as run_figures
from lln_study.paper.tables import table as tables
from tests.lln_study.paper.vision_rows import fixed, lra, timed, vit, write


def make(number: str, folder, rows):
    write(folder, rows)
    return tables.make(number, folder)


def cells(table, name: str) -> dict[str, str]:
    (line,) = [line for line in table.lines if line[0] == name]
    return dict(zip(table.columns, line, strict=True))


def test_validation_chooses_the_rate_for_seeds_that_all_have():
    rows = [vit("lln", 0.70, valid=0.8, rate=1e-3), vit("lln", 0.9, valid=0.7, rate=5e-4)]
    lucky = vit("lln", 0.99, valid=0.99, rate=5e-4, seed=7)  # has no partner at the other rate
    chosen = at_best_rate([*rows, lucky])
    assert [row["accuracy"] for row in chosen] == [0.70]


def test_table_3(tmp_path):
    rows = [vit("softmax", 0.80 + 0.01 * seed, seed=seed) for seed in range(3)]
    rows += [vit("lln_diag", 0.82, seed=seed) for seed in range(3)]
    rows += [vit("linformer", 0.79, options={"rank": 64})]
    rows += [vit("lln", 0.5, options=fixed(2.0))]  # of Fig. 10, not of this table
    (table,) = make("3", tmp_path, rows)
    assert "257 tokens" in table.title and "64 epochs" in table.title
    softmax = cells(table, "Softmax")
    assert softmax["accuracy, %"] == "81.00 ± 0.58" and softmax["paper, %"] == "81.37"
    assert cells(table, "LLN+Diag")["accuracy, %"] == "82.00 ± 0.00"
    assert [line[0] for line in table.lines] == ["Softmax", "Linformer (rank=64)", "LLN+Diag"]
    assert table.records[0]["accuracy"] == pytest.approx(0.81)
    assert table.records[0]["seeds"] == [0, 1, 2]


def test_table_3_leaves_out_a_line_that_has_nothing_beside_it(tmp_path):
    alone = vit("lln", 0.8, steps=2000)  # what Fig. 10a compares its fixed scales with
    (table,) = make("3", tmp_path, [alone])
    assert [line[0] for line in table.lines] == ["LLN"]
    (table,) = make("3", tmp_path, [alone, vit("softmax", 0.8), vit("lln_diag", 0.8)])
    assert [line[0] for line in table.lines] == ["Softmax", "LLN+Diag"]


def test_table_3_of_other_images_has_no_numbers_of_the_paper(tmp_path):
    (table,) = make("3", tmp_path, [vit("softmax", 0.9, classes=["0", "1"], data="digits")])
    assert "paper, %" not in table.columns


def test_table_3_shows_times_of_runs_that_had_the_device_for_themselves(tmp_path):
    alone, shared = vit("softmax", 0.8), vit("lln_diag", 0.8)
    alone |= {"step_ms": 5.0}
    shared |= {"step_ms": 50.0, "shared": True}
    (table,) = make("3", tmp_path, [alone, shared])
    assert cells(table, "Softmax")["ms a step"] == "5"
    assert cells(table, "LLN+Diag")["ms a step"] == ""
    (table,) = make("3", tmp_path, [alone | {"shared": True}, shared])
    assert "ms a step" not in table.columns


def arena(mechanism: str, scores: dict[str, float], **more):
    return [lra(mechanism, task, score, **more) for task, score in scores.items()]


def test_table_5_averages_the_four_tasks(tmp_path):
    softmax = {"text": 0.61, "listops": 0.20, "pathfinder": 0.7, "image": 0.38}
    rows = arena("softmax", softmax)
    rows += arena("lln_diag", {task: score + 0.01 for task, score in softmax.items()})
    rows += arena("performer", {"text": 0.58}, options={"num_features": 128})
    rows += arena("lln_diag", {"retrieval_wiki": 0.77})
    (table,) = make("5", tmp_path, rows)
    own = cells(table, "Softmax")
    assert own["Text"] == "61.00" and own["ListOps"] == "20.00" and own["avg of 4"] == "47.25"
    assert cells(table, "Performer")["avg of 4"] == "–"
    assert cells(table, "LLN+Diag")["Retrieval (stand-in)"] == "77.00"
    printed = table.lines[1]
    assert printed[0].strip() == "in the paper" and printed[-1] == "51.74"


def test_table_5_compares_equal_steps_only(tmp_path):
    rows = [lra("softmax", "text", 0.6), lra("lln", "text", 0.6)]
    rows += [lra("softmax", "text", 0.9, steps=50_000)]  # alone: not comparable with LLN
    (table,) = make("5", tmp_path, rows)
    assert cells(table, "Softmax")["Text"] == "60.00"


def test_table_5_says_which_rates_a_task_was_trained_at(tmp_path):
    rows = [
        lra(name, "text", 0.6, rate=rate) for name in ("softmax", "lln") for rate in (1e-3, 3e-4)
    ]
    rows += [lra("softmax", "image", 0.4, rate=3e-4), lra("lln", "image", 0.4, rate=3e-4)]
    rows += [lra("softmax", "pathfinder", 0.7), lra("lln", "pathfinder", 0.7, rate=3e-4)]
    (table,) = make("5", tmp_path, rows)
    said = table.notes[0]
    assert "Text: 5,000 steps of 32, rates 0.0003, 0.001, generated" in said
    assert "Image: 5,000 steps of 32, rate 0.0003, generated" in said
    assert "Pathfinder: 5,000 steps of 32, rates 0.0003, 0.001 (some mechanisms at fewer)" in said


def test_figure_of_the_arena_draws_the_runs_that_table_5_shows():
    def run(name, task, points, **more):
        curve = {"step": [0, 500], "accuracy": points, "loss": [1.0, 1.0]}
        return {**lra(name, task, points[-1], **more), "curves": {"valid": curve}}

    rows = [run("softmax", "image", [0.1, 0.4]), run("lln_diag", "image", [0.1, 0.45])]
    rows += [run("lln_diag", "image", [0.1, 0.2], rate=3e-4)]  # worse on validation
    rows += [run("lln_diag", "image", [0.1, 0.44], seed=1)]
    rows += [run("lln_diag", "text", [0.5, 0.6]), lra("softmax", "text", 0.6)]  # without a curve
    text, image = run_figures.FIGURES["arena"].panels(rows)
    assert (text.title, image.title) == ("Text", "Image")
    assert [curve.label for curve in image.curves] == ["Softmax", "LLN+Diag"]
    assert list(image.curves[1].y) == [10.0, 45.0]
    (only,) = text.curves
    assert only.label == "LLN+Diag" and only.slot == image.curves[1].slot
    assert "LLN+Diag 0.001" in image.note
    assert run_figures.FIGURES["arena"].panels([]) == []


def test_table_4(tmp_path):
    rows = [timed("softmax_eager", "text", None), timed("softmax", "text", 9.0)]
    rows += [timed("lln_diag", "text", 3.0), timed("lln_diag", "image", 4.0, mb=700.0)]
    rows += [timed("performer", "text", 5.0, options={"num_features": 128})]
    (table,) = make("4", tmp_path, rows)
    assert table.columns == ["", "Text", "Image"]
    assert cells(table, "Softmax (eager): time, ms a step")["Text"] == "OOM"
    assert cells(table, "Softmax (SDPA): time, ms a step")["Text"] == "9"
    assert cells(table, "LLN+Diag: time, ms a step")["Image"] == "4"
    assert cells(table, "LLN+Diag: memory, MiB")["Image"] == "600"  # without the data
    assert cells(table, "Performer: time, ms a step")["Text"] == "5"
    paper = [line for line in table.lines if line[0].strip() == "in the paper, MB"]
    assert ["17,108", "9,632"] in [line[1:] for line in paper]


def scales(count: int = 5) -> dict:
    steps = [100 * i for i in range(count)]
    values = [[2.0 + 0.1 * layer for layer in range(3)] for _ in steps]
    return {"scales": {"step": steps, "layers": [0, 1, 2], "alpha": values, "beta": values}}


def test_figure_9():
    panels = run_figures.scales_in_training([vit("lln_diag", 0.8, curves=scales())])
    assert [panel.title for panel in panels] == ["α during training", "β during training"]
    mean = next(curve for curve in panels[0].curves if curve.label == "mean of the layers")
    assert list(mean.y) == pytest.approx([2.1] * 5)
    assert sum(curve.label == "one layer" for curve in panels[0].curves) == 3


def test_peaks_of_runs_that_were_watched_differently_are_not_compared(tmp_path):
    watched = [vit("lln_diag", 0.8, monitor_every=250), vit("softmax", 0.8, monitor_every=250)]
    (table,) = make("3", tmp_path, watched)
    assert all(record["peak_mb"] is not None for record in table.records)
    bare = vit("softmax", 0.8, monitor_every=0)
    (table,) = make("3", tmp_path, [watched[0], bare])
    peaks = {record["mechanism"]: record["peak_mb"] for record in table.records}
    assert peaks["lln_diag"] is None and peaks["softmax"] is not None


def test_figure_10a():
    rows = [vit("lln", 0.6 + s / 10, options=fixed(s)) for s in (0.5, 1.0, 2.0)]
    rows += [vit("lln", 0.7 + s / 10, options=fixed(s), seed=1) for s in (0.5, 1.0, 2.0)]
    rows += [vit("lln", 0.83), vit("softmax", 0.81), vit("lln", 0.2, steps=10)]
    (panel,) = run_figures.accuracy_of_scales(rows)
    curves = {curve.label: curve for curve in panel.curves}
    assert list(curves["LLN, fixed α = β"].x) == [0.5, 1.0, 2.0]
    assert list(curves["LLN, fixed α = β"].y) == pytest.approx([70, 75, 85])
    assert curves["LLN, matched"].y[0] == pytest.approx(83)
    assert curves["softmax"].y[0] == pytest.approx(81)


def test_figure_10b():
    def own(values, **more):
        curve = {"loss_scale": {"step": [10, 20], "loss_scale": values}}
        return vit("lln", 0.7, curves=curve, recipe="deit-tiny", **more)

    rows = [own([65536.0, 32768.0]), own([1024.0, 512.0], options=fixed(4.0))]
    (panel,) = run_figures.loss_scale(rows)
    curves = {curve.label: list(curve.y) for curve in panel.curves}
    assert curves["LLN, matched"] == pytest.approx([1 / 65536, 1 / 32768])
    assert curves["LLN, α = β = 4"][1] == pytest.approx(1 / 512)


@pytest.mark.parametrize("number", ["3", "4", "5"])
def test_without_rows_the_command_says_how_to_get_them(number, tmp_path):
    result = CliRunner().invoke(app, ["table", number, "--results", str(tmp_path)])
    assert result.exit_code == 1 and "lln sweep sweeps/" in result.output


def test_the_figure_command_writes_files_or_says_what_is_missing(tmp_path):
    words = ["figure", "10a", "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    missing = CliRunner().invoke(app, words)
    assert missing.exit_code == 1 and "sweeps/figure_10.json" in missing.output
    write(tmp_path, [vit("lln", 0.6 + s / 10, options=fixed(s)) for s in (0.5, 1.0)])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "figure_10a.png").read_bytes().startswith(b"\x89PNG")
    assert "0.5" in (tmp_path / "out" / "figure_10a.csv").read_text()


@pytest.mark.parametrize("name", list(run_figures.FIGURES))
def test_figures_from_no_rows_are_none(name):
    assert run_figures.FIGURES[name].panels([]) == []
