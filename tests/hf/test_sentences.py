"""LLN inside a SentenceTransformer: long documents, saving and loading; tiny, without a network."""

from __future__ import annotations

import json
import runpy

import pytest
import torch

import lln.hf
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.test_examples import EXAMPLES
from tests.hf.tiny import make, padded, text

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT and its tokenizer, as transformers saves them."""
    root = tmp_path_factory.mktemp("sentences")
    tokenizer = tokenizer_of(frame=True)
    make("bert", head="AutoModel", vocab_size=len(tokenizer)).save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def encoder(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def replaced(folder, **options):
    model = encoder(folder)
    lln.hf.replace(model[0].auto_model, "lln_diag", quiet=True, near=8, **options)
    return model


TEXTS = [article(100, 1), article(20, 2), article(60, 3)]


def test_documents_of_any_length_together_or_alone(folder):
    model = replaced(folder)
    together = model.encode(TEXTS, convert_to_tensor=True)
    assert not together.allclose(encoder(folder).encode(TEXTS, convert_to_tensor=True), atol=1e-3)
    for document, wanted in zip(TEXTS, together, strict=True):
        got = model.encode(document, convert_to_tensor=True)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"learn_scale": True, "conv": 3}])
def test_saved_and_loaded(folder, tmp_path, options):
    model = replaced(folder, **options)
    expected = model.encode(TEXTS, convert_to_tensor=True)
    model.save_pretrained(str(tmp_path), create_model_card=False)
    again = lln.hf.load_sentence_transformer(tmp_path, device="cpu")
    assert torch.equal(again.encode(TEXTS, convert_to_tensor=True), expected)
    assert type(again[0].auto_model) is type(model[0].auto_model)
    assert not again[0].auto_model.training
    again.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    third = lln.hf.load_sentence_transformer(tmp_path / "again", device="cpu")
    assert torch.equal(third.encode(TEXTS, convert_to_tensor=True), expected)


def test_loaded_in_half_precision_constants_stay_in_float32(folder, tmp_path):
    model = replaced(folder, statistics="fixed", alpha=2.0, beta=2.0)
    model.save_pretrained(str(tmp_path), create_model_card=False)
    half = {"dtype": torch.bfloat16}
    again = lln.hf.load_sentence_transformer(tmp_path, device="cpu", model_kwargs=half)
    found = again[0].auto_model
    assert found.dtype == torch.bfloat16
    core = found.encoder.layer[0].attention.self.lln
    assert {x.dtype for x in core.statistics.buffers() if x.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_a_folder_that_lln_convert_made_is_opened(folder, tmp_path):
    from sentence_transformers.models import Dense

    from lln.conversion.run import convert_and_judge
    from lln.conversion.settings import Settings

    model = encoder(folder)
    model.append(Dense(32, 7))
    model.save_pretrained(str(tmp_path / "softmax"), create_model_card=False)
    lines = [json.dumps({"text": article(80, seed)}) + "\n" for seed in range(60)]
    (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    options = {"near": 16, "slots": 16}
    steps = {"transfer_steps": 0, "recover_steps": 0, "cost_length": 0, "length": 32}
    places = (tmp_path / "softmax", tmp_path / "words.jsonl", tmp_path / "linear")
    convert_and_judge(Settings(*places, options=options, device="cpu", **steps))
    found = lln.hf.load_sentence_transformer(tmp_path / "linear", device="cpu")
    assert [type(part).__name__ for part in found] == ["Transformer", "Pooling", "Dense"]
    assert torch.equal(found[2].linear.weight, model[2].linear.weight)
    assert found.encode(TEXTS, convert_to_tensor=True).shape == (3, 7)


def test_a_plain_load_stops(folder, tmp_path):
    replaced(folder).save_pretrained(str(tmp_path), create_model_card=False)
    with pytest.raises(ValueError, match=r"load this model with lln\.hf\.load"):
        encoder(tmp_path)


def test_other_folders_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no modules\.json"):
        lln.hf.load_sentence_transformer(folder)
    encoder(folder).save_pretrained(str(tmp_path), create_model_card=False)
    with pytest.raises(ValueError, match=r"was not saved after lln\.hf\.replace"):
        lln.hf.load_sentence_transformer(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True would let files"):
        lln.hf.load_sentence_transformer(tmp_path, trust_remote_code=True)


def test_it_learns(folder):
    """Gradients of a loss on embeddings reach the weights of LLN."""
    model = replaced(folder, learn_scale=True)
    features = model.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    model(dict(features))["sentence_embedding"].square().sum().backward()
    learned = [p for n, p in model.named_parameters() if ".lln." in n]
    assert learned and all(p.grad is not None and p.grad.abs().sum() > 0 for p in learned)


def test_the_example(folder, tmp_path, capsys):
    lines = [json.dumps({"text": article(150, seed)}) + "\n" for seed in range(6)]
    (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    example = runpy.run_path(str(EXAMPLES / "embed_articles.py"))
    found = example["main"](str(folder), str(tmp_path / "words.jsonl"), count=3, length=256)
    assert found["equal"] and 0 < found["cosine"] < 1
    assert "3 articles of" in capsys.readouterr().out


def test_positions_are_stretched():
    model = make("bert", head="AutoModel")
    before = model.embeddings.position_embeddings.weight.detach().clone()
    runpy.run_path(str(EXAMPLES / "embed_articles.py"))["extend_positions"](model, 509)
    after = model.embeddings.position_embeddings.weight
    torch.testing.assert_close(after[::4], before)  # 127 steps, each cut into four
    assert model(**padded(text(1, 400), 60, "right")).last_hidden_state.isfinite().all()
