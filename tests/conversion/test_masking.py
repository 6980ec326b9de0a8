"""Hidden tokens of masked language models: drawn by the step, learned from, judged by."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from lln.cli import app as cli
from lln.conversion.masking import IGNORED, Masking, masked_scores
from lln.conversion.texts import encoder_batches
from lln.records.rows import read_rows
from lln_study.paper.tables.conversion import tables
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.conversion.loud import loud

pytestmark = pytest.mark.slow  # whole conversions

TOKENIZER = tokenizer_of(frame=True)
TOKENIZER.mask_token = "[UNK]"  # a word that no text here has


def test_what_is_hidden_follows_from_seed_and_step():
    masking = Masking.of(TOKENIZER, seed=3)
    ids = torch.tensor(TOKENIZER([article(400, n) for n in range(20)])["input_ids"])
    hidden, labels = masking.hide(ids, 7)
    again, same = masking.hide(ids, 7)
    assert torch.equal(hidden, again) and torch.equal(labels, same)
    assert not torch.equal(labels, masking.hide(ids, 8)[1])
    assert not torch.equal(labels, Masking.of(TOKENIZER, seed=4).hide(ids, 7)[1])
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], ids[chosen]) and torch.equal(hidden[~chosen], ids[~chosen])
    assert not torch.isin(ids[chosen], torch.tensor(sorted(masking.special))).any()
    deviation = math.sqrt(0.15 * 0.85 / ids.numel())
    assert abs(chosen.double().mean().item() - 0.15) < 5 * deviation
    shares = [(hidden[chosen] == masking.mask_id), (hidden[chosen] == ids[chosen])]
    masked, stayed = (x.double().mean().item() for x in shares)
    assert abs(masked - 0.8) < 0.06 and abs(stayed - 0.1) < 0.05


def test_scores_are_those_of_the_hidden_tokens():
    masking = Masking.of(TOKENIZER)
    model = loud("bert", "AutoModelForMaskedLM").eval()
    batches = encoder_batches(TOKENIZER, [article(n, n) for n in (30, 50, 62)], 64, batch_size=2)
    found = masked_scores(model, batches, masking)
    total, right, count = 0.0, 0, 0
    for step, batch in enumerate(batches):
        hidden, labels = masking.hide(batch["input_ids"], step)
        with torch.no_grad():
            log_p = model(hidden, attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
        for row, column in (labels != IGNORED).nonzero().tolist():
            total -= log_p[row, column, labels[row, column]].item()
            right += int(log_p[row, column].argmax() == labels[row, column])
            count += 1
    assert found["masked_loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["masked_accuracy"] == right / count


def test_a_masked_language_model_is_judged_by_its_hidden_tokens(tmp_path):
    model = loud("bert", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "bert")
    TOKENIZER.save_pretrained(tmp_path / "bert")
    lines = [json.dumps({"text": article(200, seed)}) + "\n" for seed in range(60)]
    (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    given = ["convert", str(tmp_path / "bert"), "--data", str(tmp_path / "words.jsonl")]
    given += ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "rows")]
    given += ["--length", "64", "--transfer-steps", "4", "--recover-steps", "4"]
    given += ["--set", "near=16", "--set", "slots=16", "--judge-articles", "4"]
    done = CliRunner().invoke(cli.app, [*given, "--cost-length", "0", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    stages = json.loads((tmp_path / "out" / "conversion.json").read_text())["stages"]
    first, last = stages[0], stages[-1]
    assert first["masked_loss"] != last["masked_loss"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for row in stages:
        assert f"{row['masked_loss']:.4f}" in page and f"{row['masked_loss']:.4f}" in done.stdout
    (table,) = tables(read_rows(tmp_path / "rows" / "conversion.jsonl"))
    column = table.columns.index("hidden tokens")
    assert [line[column] for line in table.lines] == [
        f"{first['masked_loss']:.3f}", f"{last['masked_loss']:.3f}"
    ]  # fmt: skip
