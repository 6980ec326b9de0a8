"""Tables from rows: right numbers in the right cells, their scale and origin beside them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln.nn import RECOMMENDED
from lln.report.page import Table
from lln_study.paper import results
from lln_study.paper.pages import parts
from lln_study.paper.pages.blocks import NOTHING_YET, rewrite
from lln_study.paper.pages.claims import best
from lln_study.paper.pages.write import BLOCKS
from lln_study.paper.results import Mean
from lln_study.paper.tables import table as tables

FACTS = {"device": "A GPU", "torch": "2.11", "triton": "3.6", "transformers": "5.17"}
FACTS |= {"commit": "abc123", "date": "2026-11-15T08:00:00+00:00", "seconds": 10.0}
SCALE = {"recipe": "roberta-small", "layers": 6, "width": 512, "heads": 8, "length": 512}
SCALE |= {"steps": 16000, "batch_size": 32, "corpus": "wiki2015"}


def mlm(mechanism, loss, *, options=None, seed=0, **scale):
    configuration = {**SCALE, **scale, "options": options or {}}
    digest = json.dumps([mechanism, configuration])
    return {
        "subject": "mlm",
        "mechanism": mechanism,
        "loss": loss,
        "parameters": 27_400_000,
        "seed": seed,
        "configuration": configuration,
        "digest": digest,
        **FACTS,
    }


def glue(mechanism, task, score, *, options=None, seed=0, data="complete", **scale):
    configuration = {"task": task, "options": options or {}, "data": f"{task.upper()}: {data}"}
    configuration["pretrained"] = {**SCALE, **scale}
    digest = json.dumps([mechanism, configuration])
    return {
        "subject": "glue",
        "mechanism": mechanism,
        "score": score,
        "seed": seed,
        "configuration": configuration,
        "digest": digest,
        **FACTS,
    }


def step(mechanism, length, ms, mb=1024.0, *, backend=None, **changes):
    configuration = {**SCALE, "batch_size": 1, "precision": "bf16", "compile": False}
    configuration |= {"length": length, "options": {}, **changes}
    return {
        "subject": "step",
        "mechanism": mechanism,
        "step_ms": ms,
        "peak_mb": mb,
        "seed": 0,
        "out_of_memory": ms is None,
        "sdpa_backend": backend,
        "configuration": configuration,
        "digest": json.dumps([mechanism, configuration]),
        **FACTS,
    }


def write(folder, rows, name="rows"):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text)


def by_name(table):
    return {line[0]: dict(zip(table.columns, line, strict=True)) for line in table.lines}


def test_table_1_has_scores_with_errors_averages_and_the_reason_of_gaps(tmp_path):
    entropy = {"method": "entropy"}
    rows = [
        mlm("softmax", 3.5),
        mlm("lln_diag", 3.25, options=entropy),
        *(glue("softmax", "sst2", score, seed=n) for n, score in enumerate((0.90, 0.92))),
        glue("softmax", "mnli", 0.7, data="a small part"),
        glue("lln_diag", "sst2", 0.95, options=entropy),
        glue("lln_diag", "mnli", 0.75, options=entropy, data="a small part"),
        glue("lln_diag", "sst2", 0.5),
        glue("softmax", "sst2", 0.8, width=256),
    ]
    write(tmp_path, rows)
    large, small = tables.make("1", tmp_path)
    cells = by_name(large)
    assert list(cells) == ["Softmax", "LLN+Diag", "LLN+Diag (entropy)"]
    assert cells["Softmax"]["SST-2"] == "91.0 ± 1.0" and cells["Softmax"]["MLM loss"] == "3.500"
    assert cells["Softmax"]["avg"] == "80.5" and cells["Softmax"]["parameters"] == "27.4M"
    assert cells["LLN+Diag (entropy)"]["avg"] == "85.0"
    assert cells["LLN+Diag"]["MNLI"] == cells["LLN+Diag"]["avg"] == "–"
    assert cells["Softmax"]["QNLI"] == "–" and any("QNLI: –, because" in n for n in large.notes)
    assert "262M tokens of wiki2015; not the paper's setting" in large.title
    assert "MNLI: a small part." in large.notes and "× 256" in small.title
    assert list(small.columns) == ["", "MLM loss", "SST-2", "parameters"]  # one task: no average
    assert small.notes[0] == "Per cent: accuracy (SST-2)." and "avg: of" in large.notes[0]
    assert any(n == "A GPU, torch 2.11, commit abc123, 2026-11-15, seeds 0, 1" for n in large.notes)


def test_the_best_learning_rate_of_a_pretraining_counts(tmp_path):
    rows = []
    for rate, loss, score in ((1e-3, 3.0, 0.7), (1e-4, 4.0, 0.9)):
        rows.append(mlm("lln", loss, learning_rate=rate))
        rows.append(glue("lln", "rte", score, learning_rate=rate))
    write(tmp_path, rows)
    (table,) = tables.make("1", tmp_path)
    assert by_name(table)["LLN"]["RTE"] == "70.0" and by_name(table)["LLN"]["MLM loss"] == "3.000"


def test_runs_of_other_settings_are_no_seeds_of_each_other(tmp_path):
    """Rows that do not say how positions started are older than the choice."""
    rows = [
        mlm("softmax", 6.5),
        mlm("softmax", 6.7, positions="normal", seed=1),
        mlm("softmax", 3.5, positions="sinusoid"),
        mlm("softmax", 5.0, positions="sinusoid", deviation=0.04),
        glue("softmax", "sst2", 0.9, positions="sinusoid"),
        glue("softmax", "sst2", 0.8),
    ]
    write(tmp_path, rows)
    found = [by_name(table)["Softmax"] for table in tables.make("1", tmp_path)]
    assert {(line["MLM loss"], line["SST-2"]) for line in found} == {
        ("3.500", "90.0"),
        ("6.600 ± 0.100", "80.0"),
    }


def test_table_2_has_memory_time_and_ratios(tmp_path):
    rows = [
        *(step("softmax", n, ms, backend="flash") for n, ms in ((512, 40.0), (16384, 900.0))),
        *(step("lln_diag", n, ms, 2048.0) for n, ms in ((512, 50.0), (16384, 300.0))),
        step("softmax_eager", 16384, None, None),
    ]
    write(tmp_path, rows)
    (table,) = tables.make("2", tmp_path)
    cells = by_name(table)
    assert cells["Softmax (SDPA: flash): time, ms"] == {
        "N": "Softmax (SDPA: flash): time, ms",
        "512": "40",
        "16,384": "900",
    }
    assert cells["LLN+Diag: memory, GiB"]["16,384"] == "2.0"
    assert cells["Softmax (eager): time, ms"]["16,384"] == "OOM"
    assert cells["Softmax (eager): memory, GiB"]["512"] == "–"
    assert cells["LLN+Diag faster than SDPA"]["512"] == "0.80×"
    assert cells["LLN+Diag faster than SDPA"]["16,384"] == "3.00×"


def test_the_table_of_pretraining_compares_at_equal_tokens_and_time(tmp_path):
    rows = []
    for name, loss, seconds in (("softmax", 3.5, 200.0), ("lln_diag", 3.4, 100.0)):
        row = {**mlm(name, loss), "train_seconds": seconds, "tokens_per_second": 1e6 / seconds}
        row["configuration"] |= {"precision": "bf16", "batches": "packed"}
        row["digest"] = name
        curve = [
            {"kind": "eval", "step": n, "seconds": share * seconds, "loss": loss + 4 * (1 - share)}
            for n, share in enumerate((0, 0.25, 0.75, 1))
        ]
        shares = [{"step": n, "layer": 0, "head": 0, "lln_share": 0.1 * (n + 1)} for n in (0, 3)]
        rows += [row, {**row, "rows": curve}]
        rows += [{**row, "rows": shares}] if name == "lln_diag" else []
    alone = mlm("lln", 3.0, length=64)
    write(tmp_path, [*rows, {**alone, "train_seconds": 1.0}])
    (table,) = tables.make("pretraining", tmp_path)
    cells = by_name(table)
    assert cells["Softmax"]["loss"] == "3.500" and cells["Softmax"]["LLN share"] == "–"
    assert cells["Softmax"]["at equal time"] == "5.500"  # half-way through its time
    assert cells["LLN+Diag"]["at equal time"] == cells["LLN+Diag"]["loss"] == "3.400"
    assert cells["LLN+Diag"]["LLN share"] == "0.40"
    assert cells["LLN+Diag"]["tokens/s"] == "10,000"
    json.dumps(table.records)


def test_a_pretraining_that_shared_its_device_shows_its_loss_but_no_speed(tmp_path):
    timed = {**mlm("softmax", 3.5), "digest": "a", "train_seconds": 100.0}
    other = {**mlm("lln", 3.4), "digest": "b", "train_seconds": 50.0, "shared": True}
    rows = []
    for row in (timed, other):
        row |= {"tokens_per_second": 1e6 / row["train_seconds"]}
        row["configuration"] |= {"precision": "bf16", "batches": "packed"}
        end = {"kind": "eval", "step": 1, "seconds": row["train_seconds"], "loss": row["loss"]}
        rows += [row, {**row, "rows": [{**end, "step": 0, "seconds": 0.0, "loss": 9.0}, end]}]
    write(tmp_path, rows)
    (table,) = tables.make("pretraining", tmp_path)
    cells = by_name(table)
    assert (cells["LLN"]["loss"], cells["LLN"]["at equal time"]) == ("3.400", "–")
    assert (cells["LLN"]["tokens/s"], cells["Softmax"]["tokens/s"]) == ("–", "10,000")
    assert cells["Softmax"]["at equal time"] == "3.500"  # of the runs that were alone
    assert any("shared their GPU" in note for note in table.notes)
    write(tmp_path, [{**row, "shared": True} for row in rows])
    (table,) = tables.make("pretraining", tmp_path)
    assert by_name(table)["Softmax"]["at equal time"] == "–"


def test_a_run_that_was_watched_shows_no_peak(tmp_path):
    rows = [{**mlm(name, 3.0), "digest": name, "peak_mb": 2048.0} for name in ("softmax", "lln")]
    for row, every in zip(rows, (0, 50), strict=True):
        row |= {"train_seconds": 100.0, "tokens_per_second": 1e4}
        row["configuration"] |= {"precision": "bf16", "batches": "packed", "monitor_every": every}
    write(tmp_path, rows)
    (table,) = tables.make("pretraining", tmp_path)
    cells = by_name(table)
    assert (cells["Softmax"]["peak GiB"], cells["LLN"]["peak GiB"]) == ("2.0", "–")
    assert any("monitor_every" in note for note in table.notes)


def test_options_are_named_in_few_words():
    def name(**options):
        return results.mechanism({"mechanism": "lln_diag", "configuration": {"options": options}})

    assert name() == "LLN+Diag"
    given = {"method": "entropy", "mix": "learned", "near": 128, "conv": 33}
    assert name(**given) == "LLN+Diag (entropy, learned mix, C = 128, conv 33)"
    assert name(normalize_keys=True, alpha=2.0) == "LLN+Diag (unbiased, alpha=2.0)"
    assert name(normalize_keys=False) == "LLN+Diag (normalize_keys=False)"


def test_rows_are_counted_once_and_curves_and_torn_lines_not(tmp_path):
    first, second = glue("lln", "rte", 0.5), glue("lln", "rte", 0.6)
    write(tmp_path, [first, {**first, "rows": []}, second])
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write('{"subject": "glue", "dig')
    assert results.read(tmp_path) == [second]
    write(tmp_path, [{"note": "not ours"}, {"digest": "a"}, second])
    assert results.read(tmp_path) == [second]
    (tmp_path / "rows.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 is not a JSON object"):
        results.read(tmp_path)


def test_means_have_standard_errors():
    assert Mean.of([]) is None and Mean.of([2.0]) == Mean(2.0, None, 1)
    mean = Mean.of([1.0, 2.0, 3.0])
    assert mean is not None and mean.text(2) == "2.00 ± 0.58"
    assert Mean(0.5, None, 1).text(1, 100) == "50.0"


def test_the_command_prints_tables_and_records(tmp_path):
    runner = CliRunner()
    empty = runner.invoke(app, ["table", "1", "--results", str(tmp_path)])
    assert empty.exit_code == 1 and "no rows of fine-tunings on GLUE" in empty.output
    write(tmp_path, [mlm("lln", 4.0), glue("lln", "rte", 0.55)])
    shown = runner.invoke(app, ["table", "1", "--results", str(tmp_path)])
    assert shown.exit_code == 0 and "55.0" in shown.output and "not the paper's" in shown.output
    answer = runner.invoke(app, ["table", "1", "--json", "--results", str(tmp_path)])
    (record,) = json.loads(answer.output)
    assert (record["mechanism"], record["rte"], record["loss"]) == ("lln", 0.55, 4.0)
    assert (record["seeds"], record["device"], record["commit"]) == ([0], "A GPU", "abc123")
    assert record["versions"]["torch"] == "2.11" and record["tokens"] == 16000 * 32 * 512
    assert record["configuration"]["pretraining"]["layers"] == 6
    unknown = runner.invoke(app, ["table", "12", "--results", str(tmp_path)])
    assert unknown.exit_code == 2 and "there are 1, 2" in unknown.output


def test_the_block_of_a_page_is_the_table_or_says_that_there_are_no_rows(tmp_path):
    page = "<!-- measured: table_2 -->\nold\n<!-- end -->"
    assert "old" not in rewrite(page, tmp_path, BLOCKS)
    assert NOTHING_YET in rewrite(page, tmp_path, BLOCKS)
    write(tmp_path, [step("lln", 512, 40.0)])
    (table,) = tables.make("2", tmp_path)
    assert table.markdown() in rewrite(page, tmp_path, BLOCKS)


def test_a_page_shows_a_part_of_a_table_and_a_note_once(tmp_path, monkeypatch):
    made = [
        Table(
            ["", "loss", "seconds", "peak"], [[name, "1", "2", "–"] for name in "aab"], title, notes
        )
        for title, notes in (
            ("one", ["loss: in nats", "GPU"]),
            ("two", ["loss: in nats"]),
            ("no", []),
        )
    ]
    monkeypatch.setattr(tables, "make", lambda number, folder: made)
    monkeypatch.setitem(parts.PARTS, "2", parts.Part("one|two", ["seconds"], "b"))
    shown = "|  | loss |\n| --- | ---: |\n| a | 1 |"
    assert BLOCKS["table_2"](tmp_path) == (
        f"**one**\n\n{shown}\n\n- loss: in nats\n- GPU\n\n**two**\n\n{shown}"
    )


def test_readme_shows_both_softmax_and_ours_of_the_largest_scale(tmp_path):
    speed = {"train_seconds": 10.0, "tokens_per_second": 1e6, "peak_mb": 2048.0}

    def trained(name, loss, **options):
        return mlm(name, loss, options=options, precision="bf16", batches="packed") | speed

    conv = {"conv": RECOMMENDED["conv"]}
    rows = [trained("softmax", 6.8), trained("softmax", 2.65, **conv), trained("lln_diag", 3.0)]
    write(tmp_path, [*rows, trained("lln_diag", 2.91, **RECOMMENDED)])
    line = best(tmp_path).splitlines()[-1]
    assert line.endswith("6 × 512, N = 512 (recommended) | 6.80 | 2.65 | 2.91 |")
    write(tmp_path, rows)
    assert best(tmp_path) == NOTHING_YET
