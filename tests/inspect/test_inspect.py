"""lln inspect: right numbers for every head, plain words about its inputs, clear refusals."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lln import instruments
from lln.cli import app as cli
from lln.inspect import heads, page
from lln.inspect.model import CannotInspect, load, prepare
from lln.inspect.run import run
from lln.instruments.recording.attention_call import AttentionCall
from lln.instruments.recording.recorder import attention_calls
from lln.report.page import render
from tests.instruments import models
from tests.instruments.matrices import gaussian

pytestmark = pytest.mark.slow  # the command: whole models and their pages

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind. " * 20


def save(kind: str, folder: Path, *, weights: bool = True) -> Path:
    if weights:
        models.build(kind).save_pretrained(folder)
    else:
        models.config(kind).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, with special tokens around a sequence."""
    import tokenizers
    import transformers
    from tokenizers import models as kinds
    from tokenizers import pre_tokenizers, processors

    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {letter: 4 + n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = tokenizers.Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["roberta", "gpt2", "llama", "vit"])
def test_every_kind_of_model(kind, tmp_path):
    console = Console(record=True, width=100, force_terminal=False)
    folder = save(kind, tmp_path / kind)
    report = run(folder, out=tmp_path / "out", tokens=24, sequences=2, console=console)
    html, printed = report.read_text(encoding="utf-8"), console.export_text()
    with (tmp_path / "out" / "heads.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["layer"], row["head"]) for row in rows] == [
        (str(layer), str(head)) for layer in range(2) for head in range(4)
    ]
    causal = kind in ("gpt2", "llama")
    assert {row["causal"] for row in rows} == {str(causal)}
    assert html.count("<svg") == (7 if causal else 8) and html.count("<table") >= 2
    assert ("This model is causal" in html) == causal
    words = "images of Gaussian noise" if kind == "vit" else "bytes as ids"
    for text in (html, " ".join(printed.split())):
        assert words in text and "from safetensors" in text
    assert "http" not in html.replace("http://www.w3.org/", "")
    assert f"{float(rows[5]['entropy']):.1f}" in printed


def test_heads_are_measured_on_one_thread_and_the_report_says_so(tmp_path, monkeypatch):
    threads, used = torch.get_num_threads(), []
    measured = heads.head_rows
    monkeypatch.setattr(
        heads, "head_rows", lambda calls: used.append(torch.get_num_threads()) or measured(calls)
    )
    torch.set_num_threads(2)
    try:
        report = run(save("roberta", tmp_path / "model"), out=tmp_path, tokens=16, sequences=1)
        assert used == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert "2 threads for the model, 1 for the measurements" in report.read_text(encoding="utf-8")


def test_numbers_are_those_of_the_model(tmp_path):
    folder = save("roberta", tmp_path)
    loaded = load(folder)
    inputs = prepare(folder, loaded, TEXT, tokens=30, sequences=2)
    with torch.no_grad(), attention_calls(loaded.model, samples=2) as calls:
        loaded.model(**inputs.arguments)
    rows = [row for layer in heads.head_rows(calls) for row in layer]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = loaded.model(**inputs.arguments, output_attentions=True).attentions
    for row in rows:
        p = attentions[row["layer"]][:, row["head"]]
        fit = instruments.fit_lognormal(p)
        expected = {
            "entropy": instruments.entropy(p),
            "spectral_gap": instruments.spectral_gap(p),
            "column_bias": instruments.column_bias(p),
            "mu": fit.mu,
            "sigma2": instruments.log_variance(p),
            "kolmogorov_smirnov": fit.kolmogorov_smirnov,
            "top_key": p.mean(-2).amax(-1),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value.mean().item(), rel=1e-3, abs=1e-5), name


def test_a_model_saved_with_lln_is_measured_with_lln(tmp_path):
    from lln import hf

    model = load(save("roberta", tmp_path / "softmax")).model
    hf.replace(model, "lln", quiet=True)
    model.save_pretrained(tmp_path / "lln")
    loaded = load(tmp_path / "lln")
    assert "from safetensors" in loaded.weights
    inputs = prepare(tmp_path / "lln", loaded, TEXT, tokens=30, sequences=1)
    with torch.no_grad(), attention_calls(loaded.model, samples=1) as calls:
        loaded.model(**inputs.arguments)
    assert {call.kernel for call in calls} == {"lln"}


def gaussian_call(temperature: float, tokens: int = 200, **changes) -> AttentionCall:
    q, k = gaussian(tokens, 64, temperature, dtype=torch.float32)
    return AttentionCall(0, "", "softmax", **{"q": q, "k": k, **changes})


@pytest.mark.parametrize("is_causal", [False, True])
def test_predictions_hold_on_gaussian_inputs(is_causal):
    ((row,),) = heads.head_rows([gaussian_call(1.0, is_causal=is_causal)])
    assert row["sigma2_predicted"] == pytest.approx(1.0, abs=0.1)
    assert row["sigma2_product"] == pytest.approx(1.0, abs=0.1)
    assert row["sigma2"] == pytest.approx(row["sigma2_predicted"], rel=0.05)
    assert row["mu"] == pytest.approx(row["mu_predicted"], abs=0.02)
    assert row["mu"] == pytest.approx(row["mu_fenton"], abs=0.02)
    assert row["kolmogorov_smirnov"] < 0.03
    assert row["biased"] is False


def test_fenton_corrects_the_mean_where_few_keys_are_seen():
    ((row,),) = heads.head_rows([gaussian_call(0.7, tokens=24)])
    assert abs(row["mu"] - row["mu_fenton"]) < abs(row["mu"] - row["mu_predicted"])
    p = torch.full((1, 6, 6), 1 / 6)
    plain, fenton = heads.predicted_mean(p, torch.tensor([2.0]))
    assert plain.item() == pytest.approx(-math.log(6) - 1)
    of_the_sum = math.log((math.exp(2) - 1) / 6 + 1)
    assert fenton.item() == pytest.approx(-math.log(6) - (2 - of_the_sum) / 2)


def test_a_head_that_prefers_keys_is_listed():
    """A common offset of all queries makes the scores of some keys large for everyone."""
    fair = gaussian_call(0.5, tokens=128)
    biased = gaussian_call(2.0, tokens=128)
    biased.q.add_(2)
    rows = [row for layer in heads.head_rows([fair, biased]) for row in layer]
    assert rows[0]["temperature"] == pytest.approx(rows[1]["temperature"], rel=0.2)
    assert [row["biased"] for row in rows] == [False, True]
    assert rows[0]["spectral_gap"] == pytest.approx(rows[0]["gap_unbiased"], abs=0.1)
    assert "0.0" in page.biased_table([rows[1]]).lines[0][0]
    rows[1]["causal"] = True
    assert heads.is_biased(rows[1]) is (rows[1]["top_key"] > 0.25)


def test_lln_heads_are_compared_with_proposition_4_1():
    scales = {"alpha": torch.tensor([[2.1]]), "beta": torch.tensor([[2.1]])}
    q, k = gaussian(200, 64, dtype=torch.float32)
    call = AttentionCall(0, "", "lln", q=q, k=k, **scales)
    ((row,),) = heads.head_rows([call])
    assert row["sigma2"] == pytest.approx(row["sigma2_predicted"], rel=0.2)


def test_what_cannot_be_read_leaves_gaps_and_a_page():
    q, k = gaussian(12, 8, heads=3, dtype=torch.float32)
    known = AttentionCall(0, "a", "softmax", q=q, k=k)
    unknown = AttentionCall(1, "b", "performer", q=q, k=k)
    rows = [row for layer in heads.head_rows([known, unknown]) for row in layer]
    assert all(row["entropy"] is None and row["biased"] is None for row in rows[3:])
    html = render(page.build(rows, "a model", "lede", {}))
    assert "not measured" in html and "performer" in html
    assert "No head has weights" in render(page.build(rows[3:], "a model", "lede", {}))


def test_only_a_config_means_random_weights_and_says_so(tmp_path):
    folder = save("roberta", tmp_path, weights=False)
    first, state = load(folder), torch.get_rng_state()
    assert "random, seed 0: the folder has no weights" in first.weights
    second = load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_weights_that_are_missing_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save("roberta", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    removed = next(name for name in tensors if "query.weight" in name)
    del tensors[removed]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"random where the file has none: {removed} (1 tensors)" in load(folder).weights


def test_the_tokenizer_of_the_folder_is_used(tmp_path):
    folder = save("roberta", tmp_path)
    save_tokenizer(folder)
    inputs = prepare(folder, load(folder), TEXT.lower(), tokens=20, sequences=3)
    ids = inputs.arguments["input_ids"]
    assert ids.shape == (3, 20) and "by its own tokenizer" in inputs.words
    assert (ids[:, 0] == 0).all() and (ids[:, -1] == 2).all()


def test_lengths_respect_the_model_and_the_text(tmp_path):
    folder = save("roberta", tmp_path)
    loaded = load(folder)

    def shape(text, tokens, sequences):
        inputs = prepare(folder, loaded, text, tokens=tokens, sequences=sequences)
        ids = inputs.arguments["input_ids"]
        assert ids.min() >= 5 and ids.max() < 100
        return tuple(ids.shape)

    assert shape(TEXT, 1000, 2) == (2, 64)
    assert shape(TEXT[:50], 30, 2) == (1, 30)
    with pytest.raises(CannotInspect, match="the text gives sequences of 3 tokens"):
        shape("abc", 30, 2)


def broken_folders(folder: Path) -> dict[str, str]:
    """Name of a folder made below ``folder`` -> what the message must say."""
    cases = {
        "empty": "has no config.json; pass the folder that model.save_pretrained",
        "not_json": "config.json is not readable as JSON",
        "no_type": "has no model_type",
        "unknown_type": "cannot be read: ValueError",
        "pickle": "pytorch_model.bin, a pickle that could run code",
        "torn_weights": "cannot be read: ",
        "no_attention": "no attention was seen in ",
    }
    for name in cases:
        (folder / name).mkdir()
    (folder / "not_json" / "config.json").write_text("{")
    (folder / "no_type" / "config.json").write_text("{}")
    (folder / "unknown_type" / "config.json").write_text(json.dumps({"model_type": "telepathy"}))
    save("roberta", folder / "pickle", weights=False)
    (folder / "pickle" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    save("roberta", folder / "torn_weights")
    weights = folder / "torn_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    fnet = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 100}
    config = {"model_type": "fnet", "max_position_embeddings": 64, **fnet}
    (folder / "no_attention" / "config.json").write_text(json.dumps(config))
    return cases


def test_unreadable_folders_are_explained(tmp_path):
    for name, message in broken_folders(tmp_path).items():
        with pytest.raises(CannotInspect) as error:
            run(tmp_path / name, out=tmp_path / "out", tokens=20)
        assert message in str(error.value), name
    with pytest.raises(CannotInspect, match="is not a folder"):
        load(tmp_path / "absent")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path):
    folder = save("gpt2", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def lln(*arguments: str):
        return CliRunner().invoke(cli.app, ["inspect", *arguments])

    out = tmp_path / "out"
    done = lln(str(folder), "--text", str(text), "--out", str(out), "--tokens", "20")
    assert done.exit_code == 0, done.output
    assert "Entropy of a row" in done.output and (out / "report.html").exists()
    assert "text.txt" in (out / "report.html").read_text(encoding="utf-8")
    text.write_bytes(b"\xff\xfe\x00")
    done = lln(str(folder), "--text", str(text))
    assert done.exit_code == 1
    assert str(done.exception).startswith("lln inspect: --text") or "UTF-8" in done.output
    assert lln(str(folder), "--tokens", "2").exit_code == 2


def spoil(folder, suffix, change):
    """Change one tensor of a checkpoint."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("kind", ["roberta", "gpt2"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(kind, value, tmp_path):
    folder = save(kind, tmp_path / "model")

    def one(weight):
        weight.view(-1)[3] = value
        return weight

    suffix = "query.weight" if kind == "roberta" else "c_attn.weight"
    name = spoil(folder, suffix, one)
    result = CliRunner().invoke(cli.app, ["inspect", str(folder), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, SystemExit), result.exception
    said = str(result.exception)
    assert "not finite: 1 of" in said and name.split(".", 1)[1] in said


def test_activations_that_are_not_finite_are_named(tmp_path):
    folder = save("roberta", tmp_path / "model")
    spoil(folder, "query.weight", lambda weight: weight.sign() * 3e38)
    words = ["inspect", str(folder), "--out", str(tmp_path / "out"), "--tokens", "24"]
    result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "are not finite: activations overflow" in str(result.exception)


def test_a_config_that_is_nested_too_deeply_is_named(tmp_path):
    folder = save("roberta", tmp_path / "model")
    deep = "[" * 100_000 + "]" * 100_000
    (folder / "config.json").write_text(f'{{"model_type": "roberta", "x": {deep}}}')
    with pytest.raises(CannotInspect, match=r"config\.json is not readable as JSON"):
        run(folder, out=tmp_path / "out")


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    folder = save("roberta", tmp_path / "model")
    save_tokenizer(folder)
    spoil(folder, "word_embeddings.weight", lambda weight: weight[:10].clone())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    with pytest.raises(CannotInspect, match=r"cannot be run on .*do its files belong together"):
        run(folder, out=tmp_path / "out", tokens=24)
