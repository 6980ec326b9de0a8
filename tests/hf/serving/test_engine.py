"""Streams that come and go: each gets the tokens of generate for its prompt alone."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import lln.hf
from lln.hf import Engine
from tests.hf.tiny import make, text

MECHANISMS = {
    "lln": {},
    "lln normalised": {"normalize_keys": True},
    "lln_diag": {"near": 4},
    "lln_diag learned": {"near": 4, "conv": 5, "mix": "learned"},
    "lln_diag windows": {"near": lln.Near(4, overlap=3, sinks=2)},
    "lln_nearfar": {"near": lln.Near(4, overlap=5, sinks=2), "center_keys": True},
    "lln_nearfar no window": {"near": lln.Near(4, overlap=0), "feature_map": "learned"},
    "lln_nearfar before": {
        "near": lln.Near(4, overlap=3, sinks=3), "feature_map": "learned",
        "before_rotation": True,
    },
}  # fmt: skip
LENGTHS = (1, 9, 2, 17)
NEW = 10


def ready(family: str, name: str, **changes):
    """A decoder in float64: rounding chooses no token."""
    model = make(family, **changes).double()
    torch.manual_seed(11)
    lln.hf.replace(model, name.split()[0], quiet=True, **MECHANISMS[name])
    for key, x in model.named_parameters():
        if "mix_logit" in key:
            x.data.copy_(torch.linspace(-1, 1, len(x)))
    return lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])


def prompts() -> list[torch.Tensor]:
    return [row[:length] for row, length in zip(text(4, 17), LENGTHS, strict=True)]


def alone(model, prompt, new: int = NEW, seed: int = 0, **options) -> list[int]:
    torch.manual_seed(seed)
    options = {"do_sample": False, **options}
    out = model.generate(prompt[None], max_new_tokens=new, pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in MECHANISMS),
        ("gpt2", "lln_nearfar"),  # learned positions
        ("gpt2", "lln_diag learned"),
        ("qwen3", "lln_diag windows"),
    ],
)
def test_every_stream_is_generated_as_if_alone(family, name):
    """Four prompts of different lengths in two seats, each of which is used again."""
    model = ready(family, name)
    streams = Engine(model, 2).generate(prompts(), max_new_tokens=NEW)
    assert [s.tokens for s in streams] == [alone(model, prompt) for prompt in prompts()]
    assert {s.seat for s in streams} == {0, 1} and {s.ended for s in streams} == {"length"}


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9}])
def test_sampled_streams_draw_as_generate_does_with_their_seed(options):
    model = ready("llama", "lln_nearfar")
    engine, how = Engine(model, 3), {"do_sample": True, "temperature": 1.5, **options}
    first, second, third = prompts()[1:4]
    one = engine.add(first, max_new_tokens=8, seed=3, **how)
    greedy = engine.add(second, max_new_tokens=8)
    engine.step()  # the third begins later
    other = engine.add(third, max_new_tokens=8, seed=4, **how)
    while engine.free < 3:
        engine.step()
    how.setdefault("top_k", 0)  # generate's default is 50
    assert one.tokens == alone(model, first, 8, 3, **how)
    assert other.tokens == alone(model, third, 8, 4, **how)
    assert greedy.tokens == alone(model, second, 8)
    assert one.tokens != alone(model, first, 8)


def test_layers_and_heads_that_keep_softmax_have_room_for_the_longest_stream():
    model = make("llama").double()
    done = lln.hf.replace(model, "lln_diag", quiet=True, near=4)
    lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])
    done.keep_softmax([0])
    done.keep_softmax_heads({1: [0, 3]})
    with pytest.raises(ValueError, match="max_length is needed"):
        Engine(model, 2)
    engine = Engine(model, 2, max_length=17 + NEW)
    streams = engine.generate(prompts(), max_new_tokens=NEW)
    assert [s.tokens for s in streams] == [alone(model, prompt) for prompt in prompts()]
    with pytest.raises(ValueError, match=r"are 28, and streams have at most max_length=27"):
        engine.add(text(1, 18)[0], max_new_tokens=NEW)


def test_a_kept_key_head_of_near_far_attention_is_served_with_the_memory_it_has():
    model = ready("llama", "lln_nearfar before")
    plain = Engine(model, 2).nbytes
    (undo,) = model._lln_replacements.current
    undo.keep_softmax_heads({1: [2, 3]})  # key head 1, with all its query heads
    engine = Engine(model, 2, max_length=17 + NEW)
    streams = engine.generate(prompts(), max_new_tokens=NEW)
    assert [s.tokens for s in streams] == [alone(model, prompt) for prompt in prompts()]
    width = model.config.hidden_size // model.config.num_attention_heads
    each = 2 * width * (17 + NEW) * next(model.parameters()).element_size()
    assert engine.nbytes == plain + 2 * each


def test_a_softmax_model_can_be_served_as_it_is():
    model, prompt = make("llama").double(), prompts()[1]
    expected = alone(model, prompt)
    with pytest.raises(ValueError, match=r"attends by 'sdpa'.*set_attn_implementation"):
        Engine(model, 2, max_length=40)
    lln.hf.register()
    model.set_attn_implementation("lln_mixed")
    assert Engine(model, 2, max_length=40).add(prompt, max_new_tokens=NEW).tokens == []
    (stream,) = Engine(model, 2, max_length=40).generate([prompt], max_new_tokens=NEW)
    assert stream.tokens == expected


def test_a_seat_keeps_nothing_of_the_stream_before():
    """Not even what is no number."""
    model = ready("llama", "lln_nearfar before")
    engine = Engine(model, 2)
    engine.generate(prompts(), max_new_tokens=9)
    for layer in engine.layers:
        for x in layer.tensors.values():
            x.fill_(torch.nan)
    neighbour = engine.add(prompts()[3], max_new_tokens=NEW)
    engine.step()
    stream = engine.add(prompts()[0], max_new_tokens=NEW)
    while not stream.ended:
        engine.step()
    assert neighbour.tokens == alone(model, prompts()[3])
    assert stream.tokens == alone(model, prompts()[0])


def test_streams_end_by_themselves_or_are_taken():
    model = ready("llama", "lln")
    engine, prompt = Engine(model, 2), prompts()[1]
    said = alone(model, prompt)
    stop = said[3]
    first = said.index(stop)
    ends = engine.add(prompt, max_new_tokens=NEW, eos_token_id=[stop, 98])
    taken = engine.add(prompt, max_new_tokens=NEW, eos_token_id=())
    with pytest.raises(ValueError, match="all 2 seats are taken"):
        engine.add(prompt, max_new_tokens=3)
    for _ in range(first + 1):
        found = engine.step()
    assert [stream for stream, _ in found] == [ends, taken]
    assert ends.ended == "eos" and ends.tokens == said[: first + 1] and engine.free == 1
    engine.end(taken)
    assert taken.ended == "taken" and taken.tokens == said[: first + 1] and engine.free == 2
    assert engine.step() == []
    with pytest.raises(ValueError, match="has ended"):
        engine.end(taken)
    model.generation_config.eos_token_id = stop
    (again,) = engine.generate([prompt[None]], max_new_tokens=NEW)
    assert again.tokens == said[: first + 1] and again.ended == "eos"


def test_what_cannot_be_served_is_refused():
    model = ready("llama", "lln")
    with pytest.raises(ValueError, match="seats=0 must be positive"):
        Engine(model, 0)
    with pytest.raises(ValueError, match="graph=True, but the model is on cpu"):
        Engine(model, 1, graph=True)
    with pytest.raises(ValueError, match="training mode"):
        Engine(model.train(), 1)
    model.eval()
    engine = Engine(model, 1)
    for options, message in (
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": 0.5}, "temperature=0.5 would be ignored"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0 must be"),
        ({"do_sample": True, "top_p": 0.0}, "top_p=0.0"),
        ({"do_sample": True, "top_k": 0}, "top_k=0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add([3], **{"max_new_tokens": 1, **options})
    for prompt in ([], [[1, 2], [3, 4]], [0.5], [99]):
        with pytest.raises(ValueError, match="prompt h"):
            engine.add(prompt, max_new_tokens=1)
    assert engine.free == 1
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        Engine(ready("llama", "lln", rope_parameters=dynamic), 1)
    with pytest.raises(ValueError, match="learned positions for 128"):
        Engine(ready("gpt2", "lln"), 1, max_length=129)
    other = make("llama")
    lln.hf.replace(other, "elu", quiet=True)
    with pytest.raises(ValueError, match="no causal LLN attention"):
        Engine(other, 1)
    config = hf.T5Config(
        vocab_size=9, d_model=8, num_layers=1, num_heads=1, d_ff=8, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="has an encoder"):
        Engine(hf.T5ForConditionalGeneration(config).eval(), 1)
