"""Tables: what sees what, padding, a context that is read once, runs, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lln
from lln.cli.app import app
from lln.records.rows import read_rows
from lln_study.data.tables import CLASSES, draw
from lln_study.paper.figures import sets as figure
from lln_study.paper.tables import sets
from lln_study.tasks import real_tables, table
from lln_study.tasks.models import table as models
from lln_study.tasks.models.table import ORDERED, Columns, TableModel, TableSizes

SIZES = {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64}
SMALL = {
    **SIZES,
    "least": 16,
    "most": 64,
    "questions": 8,
    "valid_rows": 32,
    "test_rows": [16, 48],
    "tables": 6,
    "steps": 6,
    "batch_size": 4,
    "precision": "fp32",
    "eval_every": 2,
    "save_every": 2,
    "log_every": 1,
    "real": False,
}
CROSSING = [name for name in lln.list_mechanisms() if lln.describe(name).cross]
SETS = [name for name in CROSSING if name not in ORDERED]
ENTROPY = {"method": "entropy"}
SLOTS = {**ENTROPY, "feature_map": "learned", "slots": 24}
VARIANTS = [*((name, {}) for name in SETS), ("lln", SLOTS), ("lln", {"statistics": "running"})]
M, Q = 40, 12


def small(attention: str = "lln", **changes) -> table.TableRun:
    return table.configure(**{"attention": attention, **SMALL, **changes})


def made(attention: str, options=None) -> TableModel:
    torch.manual_seed(0)
    model = TableModel(TableSizes(attention, options or {}, **SIZES)).eval()
    with torch.no_grad():  # larger weights: attention that differs from row to row
        for block in model.blocks:
            block.attention.query.weight.mul_(3)
    return model


def tables(count: int = 3):
    features, labels = draw(count, M + Q, seed=5)
    return features, labels[:, :M]


named = pytest.mark.parametrize(("attention", "options"), VARIANTS, ids=str)


@named
@torch.no_grad()
def test_a_question_changes_no_other_row(attention, options):
    """Neither the other answers nor, in training, what is measured."""
    features, labels = tables()
    model = made(attention, options)
    changed = features.clone()
    changed[:, M + 3] = 50 * torch.randn_like(changed[:, M + 3])
    others = torch.arange(Q) != 3
    for mode in (False, True):
        model.train(mode)
        before, after = model(features, labels), model(changed, labels)
        assert torch.equal(before[:, others], after[:, others])
        assert not torch.equal(before[:, 3], after[:, 3])
        if options.get("statistics") == "running":
            break  # training moves the averages: the next pass differs for that alone


@pytest.mark.parametrize("options", [{}, SLOTS], ids=str)
def test_running_statistics_do_not_see_questions(options):
    features, labels = tables()
    changed = features.clone()
    changed[:, M:] = 50 * torch.randn_like(changed[:, M:])
    stored = []
    for rows in (features, changed):
        model = made("lln", {**options, "statistics": "running"}).train()
        model(rows, labels)
        stored.append({name: x for name, x in model.named_buffers() if "statistics" in name})
    assert stored[0] and any(x.abs().sum() > 0 for x in stored[0].values())
    assert all(torch.equal(x, stored[1][name]) for name, x in stored[0].items())


@named
@torch.no_grad()
def test_questions_do_not_change_the_context(attention, options, monkeypatch):
    features, labels = tables()
    model = made(attention, options)
    seen: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out[:, :M]))
    model(features, labels)
    fewer = torch.cat([features[:, :M], -features[:, M : M + 5]], dim=1)
    model(fewer, labels)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)


@named
@torch.no_grad()
def test_padding_and_the_order_of_rows_change_nothing(attention, options):
    features, labels = tables()
    model = made(attention, options)
    expected = model(features, labels)
    noise = torch.full((len(features), 9, features.shape[2]), 1e3)
    padded = torch.cat([features[:, :M], noise, features[:, M:]], dim=1)
    mask = (torch.arange(M + 9) < M).expand(len(features), -1)
    found = model(padded, torch.nn.functional.pad(labels, (0, 9), value=1), mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    order = torch.randperm(M)
    mixed = torch.cat([features[:, order], features[:, M:]], dim=1)
    found = model(mixed, labels[:, order])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@named
def test_a_context_read_once_gives_the_same_answers(attention, options, monkeypatch):
    """Read in chunks it does, too, where α and β need not be measured over all of them."""
    features, labels = tables()
    model = made(attention, options)
    with torch.no_grad():
        expected = model(features, labels)
    memory = model.remember(features[:, :M], labels)
    found = torch.cat([model.answer(memory, part) for part in features[:, M:].split(5, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    is_state = attention == "lln"
    assert all(isinstance(kept, models.Summary) == is_state for kept in memory.layers)
    if options.get("statistics") == "running" or not is_state:
        monkeypatch.setattr(models, "CHUNK", 16)
        memory = model.remember(features[:, :M], labels)
        found = model.answer(memory, features[:, M:])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_state_of_a_context_does_not_grow():
    model = made("lln", ENTROPY)
    sizes = []
    for rows in (20, 200):
        features, labels = draw(1, rows, seed=0)
        states = [kept.state for kept in model.remember(features, labels).layers]
        sizes.append([state.mean.shape for state in states])
    assert sizes[0] == sizes[1] and len(sizes[0]) == 2


@pytest.mark.parametrize("name", ["polaformer", "cosformer", *ORDERED])
def test_what_cannot_cross_or_looks_at_places_is_refused(name):
    with pytest.raises(ValueError, match=f"attention='{name}' cannot .* choose from softmax, lln"):
        small(name)


def test_keys_that_the_state_cannot_hold_are_refused():
    features, labels = tables()
    with pytest.raises(ValueError, match="center_keys and normalize_keys"):
        made("lln", {"center_keys": True}).remember(features[:, :M], labels)


def test_missing_values_count_for_nothing():
    features = torch.tensor([[[1.0, 5.0], [3.0, 5.0], [torch.nan, 5.0], [100.0, torch.nan]]])
    mask = torch.tensor([[True, True, True, False]])
    columns = Columns.of(features, mask)
    assert columns.mean.flatten().tolist() == [2.0, 5.0]
    assert columns.deviation.flatten().tolist() == [1.0, 0.0]
    found = columns.normalized(features)[0]
    expected = [[-1, 0], [1, 0], [0, 0], [models.LARGEST, 0]]  # one column of two tells: √2
    torch.testing.assert_close(found[:, :2], 2**0.5 * torch.tensor(expected).float())
    assert found[:, 2:].tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]


def test_units_of_columns_do_not_matter():
    features, labels = tables()
    model = made("lln", ENTROPY)
    with torch.no_grad():
        expected = model(features, labels)
        found = model(1e3 * features - 7, labels)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_batches_are_functions_of_step_and_row():
    task = table.Table(small())
    whole = task.batch(4, slice(0, 4))
    parts = [task.batch(4, slice(i, i + 2)) for i in (0, 2)]
    for name, values in whole.items():
        both = torch.cat([part[name] for part in parts])
        assert torch.equal(values.nan_to_num(-1), both.nan_to_num(-1)), name
    other = table.Table(small(seed=1)).batch(4, slice(0, 4))
    assert not torch.equal(whole["labels"], other["labels"])


def test_contexts_have_the_sizes_asked_for():
    assert table.context_lengths(128, 4096) == [256, 512, 1024, 2048, 4096]
    assert table.context_lengths(100, 150) == [150] and table.context_lengths(64, 64) == [64]
    task = table.Table(small())
    sizes, shapes = [], set()
    for step in range(30):
        batch = task.batch(step, slice(0, 4))
        sizes += batch["key_mask"].sum(1).tolist()
        shapes.add(batch["context"].shape[1])
        assert batch["features"].shape[1] == batch["context"].shape[1] + 8
    assert min(sizes) >= 16 and max(sizes) <= 64 and shapes == {32, 64}


def test_contexts_of_all_sizes_have_the_same_questions():
    task = table.Table(small())
    few, many = (next(iter(task.in_order(f"cells_{rows}"))) for rows in (16, 48))
    assert torch.equal(few["labels"], many["labels"])
    assert torch.equal(few["context"], many["context"][:, :16])


def test_a_run_writes_its_row_and_a_killed_one_the_same(tmp_path):
    class Stop(Exception):
        pass

    class Kill:
        def start(self, config, step): ...
        def train(self, row, tokens_per_second): ...
        def evaluation(self, row): ...
        def stop(self): ...
        def at(self, step):
            if step == 5:
                raise Stop

    config = small(options=SLOTS)
    row = table.run(config, folder=tmp_path / "a", results=tmp_path / "table.jsonl")
    assert read_rows(tmp_path / "table.jsonl") == [json.loads(json.dumps(row))]
    assert row["subject"] == "table" and row["digest"] == table.key(config)[0]
    cases = [f"{kind}_{rows}" for kind in ("network", "cells") for rows in (16, 48)]
    for name in ("accuracy", "loss", "neighbours"):
        assert all(np.isfinite(row[f"{name}_{case}"]) for case in cases)
    assert row["accuracy"] == pytest.approx(np.mean([row[f"accuracy_{case}"] for case in cases]))
    with pytest.raises(Stop):
        table.run(config, folder=tmp_path / "b", progress=Kill())
    again = table.run(config, folder=tmp_path / "b", tensorboard=False)
    for name in ("accuracy", "loss", "valid_accuracy", "best_step", "train_loss"):
        assert again[name] == row[name], name


def test_it_learns(tmp_path):
    """From a few hundred tables with two easy columns a model knows more than chance."""
    easy = {"kinds": ["linear"], "test_kinds": ["linear"], "least": 32, "eval_every": 0}
    config = small(**easy, options=ENTROPY, steps=150, batch_size=16, learning_rate=3e-3)
    row = table.run(config)
    assert row["loss"] < np.log(CLASSES) - 0.5


def test_real_tables_are_classified_and_compared(monkeypatch):
    monkeypatch.setattr(real_tables, "NAMES", ("wine", "iris"))
    ours = real_tables.in_context(made("lln"), torch.device("cpu"), count=2)
    row = real_tables.fitted_row("k nearest neighbours", count=2)
    assert set(ours) == set(row["real"]) == {"wine", "iris"}
    assert row["real"]["iris"] > 0.9 and 0 <= ours["iris"] <= 1
    with pytest.raises(ValueError, match="choose from wine, iris"):
        next(real_tables.splits("titanic"))


def test_many_columns_are_reduced_by_the_context_alone():
    x, y, questions, answers = next(real_tables.splits("digits"))
    assert x.shape == (898, 16) and questions.shape == (899, 16) and len(answers) == 899
    assert abs(x.mean(0)).max() < 1e-6 < abs(questions.mean(0)).max()
    assert set(y) == set(range(10))


def test_the_command_trains_and_its_rows_become_tables(tmp_path, monkeypatch):
    words = {**SMALL, "steps": 2, "real": True, "test_rows": "16,48"}
    monkeypatch.setattr(real_tables, "NAMES", ("iris",))
    arguments = ["train", "table", "--out", str(tmp_path / "run")]
    arguments += ["--results", str(tmp_path / "table.jsonl")]
    for name, value in words.items():
        arguments += ["--set", f"{name}={value}"]
    for attention in ("lln", "softmax"):
        own = [*arguments, "--attention", attention, "--out", str(tmp_path / attention)]
        found = CliRunner().invoke(app, own)
        assert found.exit_code == 0 and "real tables: iris 0." in found.output, found.output
    results = ["--results", str(tmp_path / "table.jsonl")]
    found = CliRunner().invoke(app, ["train", "table", "--fitted", *results])
    assert found.exit_code == 0 and "gradient boosting: iris 0.9" in found.output, found.output
    known = sets.tables(read_rows(tmp_path / "table.jsonl"))
    shown = "\n".join(each.markdown() for each in known)
    assert len(known) == 3, shown
    assert shown.count("| LLN |") == 3 and "| k nearest neighbours |" in shown
    rows = read_rows(tmp_path / "table.jsonl")
    larger = [{**row, "configuration": {**row["configuration"], "width": 64}} for row in rows[:1]]
    variant = {"options": {"learn_scale": True}}
    rows.append({**rows[-1], "configuration": {**rows[-1]["configuration"], **variant}})
    drawn = figure.panels([*rows, *larger])
    models = ("2 layers × 64", "2 layers × 32")
    titles = [f"{kind}, {model}" for model in models for kind in ("Networks", "Cells")]
    assert [panel.title for panel in drawn] == titles
    assert [curve.label for curve in drawn[2].curves] == ["k nearest neighbours", "Softmax", "LLN"]
    assert [table.title.split(", 2 heads")[0] for table in sets.tables([*rows, *larger])][::3] == [
        "Generated tables, networks: 2 layers × 64", "Generated tables, networks: 2 layers × 32",
    ]  # fmt: skip
    assert sets.tables([]) == []


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="kinds=\\['forest'\\]: choose from network"):
        small(kinds=["forest"])
    with pytest.raises(ValueError, match="most=8 is not possible"):
        small(most=8)
