"""The paper's figures: the numbers behind them, the drawings, the files of ``lln figure``."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from lln.report.panels import as_files, as_page_plots
from lln_study.paper.figures import ATTENTIONS, FIGURES, concentration, matching, sums
from lln_study.paper.figures.drawing import PANELS, STYLES
from lln_study.paper.figures.inputs import gaussian

# Entropy (bits), spectral gap, mutual information (bits) at N = 512, D = 64: means over 20 draws
# for LLN and 4 for softmax, rounded to two digits, of an independent implementation.
TABLE = {
    (0.3, "softmax"): (3.84, 0.48, 4.85),
    (0.3, "LLN paper"): (2.03, 0.25, 4.17),
    (0.3, "LLN variance"): (2.18, 0.27, None),
    (0.3, "LLN entropy"): (4.41, 0.54, 2.93),
    (0.3, "LLN α = β = 1"): (8.37, 0.93, None),
    (0.5, "softmax"): (6.35, 0.77, 2.56),
    (0.5, "LLN paper"): (4.23, 0.52, 3.03),
    (0.5, "LLN variance"): (4.28, 0.53, None),
    (0.5, "LLN entropy"): (6.65, 0.78, 1.60),
    (0.5, "LLN α = β = 1"): (8.80, 0.97, None),
    (1.0, "softmax"): (8.28, 0.94, 0.71),
    (1.0, "LLN paper"): (7.84, 0.89, 0.82),
    (1.0, "LLN variance"): (7.57, 0.86, None),
    (1.0, "LLN entropy"): (8.31, 0.93, 0.49),
    (1.0, "LLN α = β = 1"): (8.96, 0.99, None),
    (2.0, "softmax"): (8.82, 0.97, 0.18),
    (2.0, "LLN paper"): (8.79, 0.97, 0.15),
    (2.0, "LLN variance"): (8.74, 0.97, None),
    (2.0, "LLN entropy"): (8.82, 0.97, 0.12),
    (2.0, "LLN α = β = 1"): (8.99, 1.0, None),
}
INDIFFERENT = {"(qᵀk)²": 7.95, "ReLU(qᵀk)": 7.59, "φ = x²": 8.94, "φ = ReLU": 8.92}
ROUNDING = 0.005


@pytest.mark.slow
def test_figure_2_agrees_with_an_independent_table():
    setting = concentration.Setting(temperatures=(0.3, 0.5, 1.0, 2.0), draws=6)
    rows = {(row["temperature"], row["attention"]): row for row in concentration.rows(setting)}
    for (temperature, name), expected in TABLE.items():
        row = rows[temperature, name]
        others = 4 if name == "softmax" else 20
        for measure, value in zip(concentration.MEASURES, expected, strict=False):
            if value is not None:
                error = row[f"{measure}_sd"] * math.sqrt(1 / setting.draws + 1 / others)
                distance = abs(row[measure] - value)
                assert distance <= 2 * error + ROUNDING, (temperature, name, measure)
    for name, bits in INDIFFERENT.items():
        assert rows[0.3, name]["entropy"] == pytest.approx(bits, abs=0.01)


@pytest.mark.parametrize("name", INDIFFERENT)
def test_kernels_indifferent_to_temperature(name):
    """Fig. 2 computes them once: scaling q and k changes nothing."""
    attention = ATTENTIONS[name]
    assert attention.scale_free
    q, k = gaussian(48, 8, seed=0)
    found = [attention.measure(c * q, c * k, concentration.MEASURES) for c in (0.3, 1.0, 3.0)]
    assert found[0] == pytest.approx(found[1], abs=1e-9) and found[1] == pytest.approx(found[2])


def test_other_kernels_feel_the_temperature():
    q, k = gaussian(48, 8, seed=0)
    for name, attention in ATTENTIONS.items():
        if not attention.scale_free:
            cold, hot = (attention.measure(c * q, c * k, ("entropy",)) for c in (2.0, 0.5))
            assert cold["entropy"] < hot["entropy"] - 0.1, name


def test_figure_2_has_every_attention_and_its_spread():
    setting = concentration.Setting(tokens=32, head_dim=8, temperatures=(0.5, 1.0), draws=3)
    rows = list(concentration.rows(setting))
    assert [row["attention"] for row in rows[::2]] == list(ATTENTIONS) == list(STYLES)
    for row in rows:
        assert row["entropy_sd"] > 0 and 0 <= row["spectral_gap"] <= 1
        total = row["entropy"] + row["mutual_information"] + row["column_bias"]
        assert total == pytest.approx(5)
    assert rows == list(concentration.rows(setting)), "the same seed gives the same rows"


def test_figure_5a_is_within_one_per_cent_where_the_theory_holds():
    setting = matching.Setting(variances=(0.25, 1.0, 4.0, 16.0), draws=2)
    rows = list(matching.softmax_rows(setting))
    for row in rows:
        assert row["variance_within_rows"] == pytest.approx(row["variance_predicted"], rel=0.01)
        if row["score_variance"] < 1:
            assert row["variance_all"] == pytest.approx(row["variance_predicted"], rel=0.01)
        if row["score_variance"] <= 4:
            assert row["mean"] == pytest.approx(row["mean_predicted"], rel=0.01)
            assert row["kolmogorov_smirnov"] < 0.01
    assert rows[-1]["mean"] > rows[-1]["mean_predicted"] + 1, "and breaks beyond 2 ln N"


def test_figure_5b_exact_matching_lies_on_softmax():
    setting = matching.Setting(variances=(0.5, 4.0), draws=4)
    rows = {(r["attention"], r["score_variance"]): r for r in matching.matched_rows(setting)}
    for variance in setting.variances:
        target = rows["softmax", variance]["variance_within_rows"]
        exact = rows["LLN variance", variance]["variance_within_rows"]
        spread = rows["LLN variance", variance]["variance_within_rows_sd"]
        assert abs(exact - target) < 2 * spread
        assert rows["LLN α = β = 1", variance]["variance_within_rows"] < target / 10
    low, high = (rows["LLN paper", v]["variance_within_rows"] / v for v in setting.variances)
    assert low < 0.85 and high > 0.97, "the published line is too low for small variances"


def test_figure_6a_errors_of_fenton():
    setting = sums.Setting(terms=(64,), moderate=(0.2, 1.2, 2.0, 4.0), samples=60_000)
    rows = {row["input_variance"]: row for row in sums.moderate_rows(setting)}
    for variance, expected in ((0.2, 0.0), (1.2, 0.06), (2.0, 0.22), (4.0, 1.30)):
        row = rows[variance]
        error = 3 * row["variance_se"] / row["variance"] * (1 + expected)
        assert abs(row["error"] - expected) < error + 0.01, (variance, row["error"])


def test_figure_6a_simulation_is_that_of_a_sum():
    """One term: Var[ln S] = σ², for which Fenton's law is exact."""
    row = next(sums.moderate_rows(sums.Setting(terms=(1,), moderate=(0.7,), samples=20_000)))
    assert row["fenton"] == pytest.approx(0.7)
    assert abs(row["variance"] - 0.7) < 4 * row["variance_se"]


def test_figure_6b_grows_linearly_in_the_end():
    setting = sums.Setting(terms=(64,), samples=20_000)
    rows = list(sums.broad_rows(setting))
    assert 0.17 < rows[0]["slope"] < 0.20
    for row in rows:
        if row["input_variance"] >= setting.linear_from:
            assert row["variance"] == pytest.approx(row["line"], rel=0.04)
    assert rows[0]["line"] < 0 < rows[0]["variance"], "but not at the beginning"


def test_figure_7_histograms_are_densities():
    setting = matching.Setting(tokens=128, draws=2)
    rows = list(matching.histogram_rows(setting))
    for name in matching.HISTOGRAM:
        own = [row for row in rows if row["attention"] == name]
        width = own[1]["log_p"] - own[0]["log_p"]
        assert sum(row["density"] for row in own) * width == pytest.approx(1)
        assert sum(row["normal_density"] for row in own) * width == pytest.approx(1, abs=0.05)
    skew = {row["attention"]: row["skew"] for row in rows}
    assert abs(skew["softmax"]) < 0.2 < 0.4 < skew["LLN variance"]


def test_matrix_of_a_curve_is_the_definition():
    from lln.ops import reference

    q, k = gaussian(20, 8, seed=1)
    for name in ("LLN paper", "LLN entropy, normalize_keys"):
        attention = ATTENTIONS[name]
        alpha, beta = (torch.full((1, 1), s, dtype=q.dtype) for s in attention.scales(q, k))
        keys = k
        if attention.normalize_keys:
            keys, beta = torch.log_softmax(beta * k, -1), torch.ones_like(beta)
        expected = reference.lln_matrix(q, keys, alpha=alpha, beta=beta)[0, 0]
        assert torch.allclose(attention.matrix(q, k), expected, atol=1e-14)


@pytest.fixture(scope="module")
def quick_rows() -> dict[str, list]:
    return {name: list(figure.quick()) for name, figure in FIGURES.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_drawings(name, quick_rows):
    panels = PANELS[name](quick_rows[name])
    drawn = as_files(f"figure-{name}", panels)
    assert drawn["png"].startswith(b"\x89PNG")
    svg = drawn["svg"].decode()
    for panel in panels:
        assert panel.title in svg and panel.x.label in svg
        assert all(curve.label in svg for curve in panel.curves)
    plots = as_page_plots(f"figure-{name}", panels)
    assert len(plots) == len(panels)
    for element, _ in plots:
        assert element.startswith("<svg role") and "#0003" not in element and "var(--ink" in element


def test_the_same_rows_give_the_same_bytes(quick_rows):
    panels = PANELS["6b"](quick_rows["6b"])
    assert as_files("figure-6b", panels) == as_files("figure-6b", panels)


def test_command_writes_csv_svg_and_png(tmp_path):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    done = CliRunner().invoke(cli.app, ["figure", "6a", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"figure_6a.csv", "figure_6a.svg", "figure_6a.png"}
    with (tmp_path / "figure_6a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(list(FIGURES["6a"].quick()))
    assert rows[0].keys() >= {"terms", "fenton", "seed", "samples", "commit", "device"}


@pytest.mark.parametrize("arguments", [["3"], [], ["2", "--all"]])
def test_command_explains_what_to_pass(arguments):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    done = CliRunner().invoke(cli.app, ["figure", *arguments])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "pass one of 2, 5a, 5b, 6a, 6b, 7," in said and "or --all" in said
