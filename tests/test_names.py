"""The public names: what each means, and where it stands."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lln
from lln.nn import RECOMMENDED, LLNAttention, LLNMultiheadAttention, preset_of, recommended
from lln.nn.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
MODULES = ["lln", *(f"lln.{name}" for name in lln._MODULES)]


def inputs(heads: int = 4, key_heads: int = 2, tokens: int = 12, size: int = 8):
    return (torch.randn(2, n, tokens, size) for n in (heads, key_heads, key_heads))


# mix ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", ["average", 0.3, [0.1, 0.2, 0.8, 1.0]], ids=str)
def test_mix_means_the_same_in_function_module_and_zoo(mix):
    q, k, v = inputs(key_heads=4)
    out = lln.attention(q, k, v, near=4, mix=torch.tensor(mix) if isinstance(mix, list) else mix)
    made = lln.create("lln_diag", dim=32, num_heads=4, near=4, mix=mix)
    for core in (LLNAttention(4, 8, near=4, mix=mix), made.core):
        torch.testing.assert_close(core(q, k, v), out)
    whole = LLNMultiheadAttention(32, 4, near=4, mix=mix)
    torch.testing.assert_close(whole.attention(q, k, v), out)


def test_near_means_the_same_in_function_module_and_zoo():
    q, k, v = inputs(key_heads=4)
    near = lln.Near(4, overlap=2, sinks=1, scale=0.3, joint=True)
    out = lln.attention(q, k, v, near=near)
    made = lln.create("lln_diag", dim=32, num_heads=4, near=near.to_json())
    named = lln.create("lln_nearfar", dim=32, num_heads=4, near=replace(near, joint=False))
    named.core.statistics.matching = made.core.statistics.matching  # of another method
    for core in (LLNAttention(4, 8, near=near), made.core, named.core):
        torch.testing.assert_close(core(q, k, v), out)
    whole = LLNMultiheadAttention(32, 4, near=near)
    torch.testing.assert_close(whole.attention(q, k, v), out)


@pytest.mark.parametrize(
    "near", [lln.Near(4), lln.Near(4, overlap=2, sinks=1, scale=0.3, joint=True)]
)
def test_a_near_field_is_shown_as_one_writes_it(near):
    assert eval(repr(near), {"Near": lln.Near}) == near


def test_a_fixed_mix_is_kept_and_dropped_out_like_a_learned_one():
    q, k, v = inputs()
    fixed = LLNAttention(4, 8, num_kv_heads=2, near=4, mix=torch.tensor([0.1, 0.4, 0.5, 0.9]))
    learned = LLNAttention(4, 8, num_kv_heads=2, near=4, mix="learned")
    assert learned.mix_logit is not None
    learned.mix_logit.data = torch.tensor([0.1, 0.4, 0.5, 0.9]).logit()
    torch.testing.assert_close(fixed(q, k, v), learned(q, k, v))
    torch.testing.assert_close(fixed.mix_weight(), learned.mix_weight())
    assert not dict(fixed.named_parameters()) and "mix=[0.1" in repr(fixed)
    with torch.device("meta"):
        empty = LLNAttention(4, 8, num_kv_heads=2, near=4, mix=[0.1, 0.4, 0.5, 0.9])
    empty.load_state_dict(fixed.state_dict(), assign=True)
    torch.testing.assert_close(empty(q, k, v), fixed(q, k, v))


@pytest.mark.parametrize(
    ("mix", "error", "message"),
    [
        ("both", ValueError, "mix='both' is unknown; choose from average, learned"),
        (1.5, ValueError, r"mix=1.5 is not in \[0, 1\]"),
        ([0.5, 0.5], ValueError, r"mix has shape \[2\]; pass a number or \[4\]"),
        (None, TypeError, "mix=None is not possible; choose from average, learned"),
        (True, TypeError, "mix=True is not possible"),
    ],
)
def test_a_wrong_mix_of_a_module_is_refused(mix, error, message):
    with pytest.raises(error, match=message):
        LLNAttention(4, 8, near=4, mix=mix)


def test_the_function_says_where_a_mix_is_learned():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"mix='learned' is unknown.*learned by lln.nn.LLNAtt"):
        lln.attention(q, k, v, near=4, mix="learned")


# presets --------------------------------------------------------------------------------------


def test_presets_are_what_the_guides_say():
    text = {"method": "entropy", "mix": "learned", "near": 128, "conv": 33}
    assert recommended() == recommended("encoder") == text == dict(RECOMMENDED)
    assert recommended("decoder") == {**text, "statistics": "running"}
    shared = {"feature_map": "learned", "learn_scale": True, "sharpness": 0.6}
    shared |= {"statistics": "fixed", "method": "entropy"}
    encoder = {"near": lln.Near(128, joint=True), **shared, "center_keys": True}
    assert recommended("convert-encoder") == encoder
    decoder = {"near": lln.Near(128, overlap=128, sinks=4, joint=True), **shared}
    assert recommended("convert-decoder") == decoder
    for place, (name, options) in PRESETS.items():
        module = lln.create(name, dim=16, num_heads=2, **options)
        assert isinstance(module.core, LLNAttention)
        assert preset_of(name, options) == place


def test_a_preset_is_a_copy_and_unknown_ones_are_named():
    recommended()["near"] = 1
    assert recommended()["near"] == 128
    with pytest.raises(ValueError, match=r"place='encodr' is unknown; did you mean 'encoder'\?"):
        recommended("encodr")


def test_only_a_whole_preset_is_named():
    assert preset_of("lln_diag", {**RECOMMENDED, "dropout": 0.1}) == "encoder"
    assert preset_of("lln_diag", {**RECOMMENDED, "conv": 3}) is None
    assert preset_of("lln_nearfar", dict(RECOMMENDED)) is None
    joint = {**RECOMMENDED, "near": lln.Near(128, joint=True)}
    assert preset_of("lln_diag", joint) is None
    assert preset_of("performer", {}) is None


def test_recommended_is_a_name_like_others():
    core = lln.create("recommended", dim=16, num_heads=2, near=4).core
    assert core.conv == 33 and core.mix == "learned" and core.near.block == 4
    assert not core.causal and core.statistics.per_sample
    causal = lln.create("recommended", dim=16, num_heads=2, causal=True).core
    assert causal.causal and not causal.statistics.per_sample and causal.near.block == 128
    with pytest.raises(ValueError, match=r"choice by place.*lln.nn.recommended\(place\)"):
        lln.describe("recommended")
    with pytest.raises(TypeError, match="'lln_diag' has no option 'landmarks'"):
        lln.create("recommended", dim=16, num_heads=2, landmarks=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_replace_takes_the_preset_of_the_place(causal, loaded, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    import lln.hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "vocab_size": 20}
    kind = ("LlamaConfig", "LlamaModel") if causal else ("BertConfig", "BertModel")
    make, config = getattr(transformers, kind[1]), getattr(transformers, kind[0])(**sizes)
    model = make(config)
    if loaded:
        model.save_pretrained(tmp_path)
        model = make.from_pretrained(tmp_path)
    undo = lln.hf.replace(model)
    place = ("convert-" if loaded else "") + ("decoder" if causal else "encoder")
    assert (undo.attention, undo.options) == (PRESETS[place][0], recommended(place))
    assert f"recommended for the place {place!r}: {undo.attention}, " in capsys.readouterr().out
    undo()
    lln.hf.replace(model, near=4, quiet=True)
    assert capsys.readouterr().out == ""
    assert next(m for m in model.modules() if isinstance(m, LLNAttention)).near.block == 4


def test_saved_models_name_their_preset(tmp_path):
    transformers = pytest.importorskip("transformers")
    import lln.hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, vocab_size=20)
    model = transformers.BertModel(config)
    undo = lln.hf.replace(model, "lln_diag", quiet=True, **recommended("encoder"))
    model.save_pretrained(tmp_path / "preset")
    undo()
    lln.hf.replace(model, "lln_diag", quiet=True, near=4, mix=torch.tensor([0.2, 0.7]))
    model.save_pretrained(tmp_path / "own")
    saved = {
        name: json.loads((tmp_path / name / "config.json").read_text())["lln"][0]
        for name in ("preset", "own")
    }
    assert saved["preset"]["preset"] == "encoder"
    assert saved["preset"]["options"].items() >= dict(RECOMMENDED).items()
    assert "preset" not in saved["own"]
    for name in saved:
        again = lln.hf.load(tmp_path / name)
        assert again.config.lln == [saved[name]]
    assert again.encoder.layer[0].attention.self.lln.mix_weight().tolist() == pytest.approx(
        [0.2, 0.7]
    )


# names ----------------------------------------------------------------------------------------


def test_one_name_is_one_function():
    """Two functions of a name in two places would do different things: they are told apart."""
    defined = re.compile(r"^def (read_mask|calibrate|calibrate_packed)\(", flags=re.M)
    found = [
        name
        for path in (ROOT / "lln").rglob("*.py")
        for name in defined.findall(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == ["calibrate", "read_mask"], found  # those of lln.hf


@pytest.mark.slow
def test_modules_are_public_and_loaded_on_first_use():
    assert {"hf", "distributed", "onnx", "nn", "moments", "instruments"} <= set(lln.__all__)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'onnx']))\n"
        "from lln import *\n"
        "import lln\n"
        "print('hf' in lln.__all__, 'onnx' in lln.__all__, 'hf' in dir(lln), nn.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True", "lln.nn"], done.stderr


# shapes ---------------------------------------------------------------------------------------

TENSORS = ("q", "k", "v", "q_features", "k_features", "query", "key", "value")


def callables():
    """Every public function, class and method that takes queries, keys or values."""
    seen = set()
    for module in MODULES:
        place = importlib.import_module(module)
        for name in place.__all__:
            value = getattr(place, name)
            own = [(f"{module}.{name}", value)]
            if inspect.isclass(value):
                methods = inspect.getmembers(value, inspect.isfunction)
                own += [
                    (f"{module}.{name}.{key}", method)
                    for key, method in methods
                    if not key.startswith("_") and method.__module__.startswith("lln")
                ]
            for path, found in own:
                if not inspect.isroutine(found) or id(found) in seen:
                    continue
                taken = [key for key in inspect.signature(found).parameters if key in TENSORS]
                if taken:
                    seen.add(id(found))
                    yield path, found, taken


def untold(function, taken) -> list[str]:
    """What signature and docstring do not say of shapes, as ``[B, H, N, D]``, and of dtypes."""
    documentation, missing = inspect.getdoc(function) or "", []
    for name in taken:
        annotation = str(inspect.signature(function).parameters[name].annotation)
        shapes = re.findall(r"Float\[Tensor, ['\"]([^'\"]+)['\"]\]", annotation)
        if not shapes:
            missing.append(f"the shape of {name} in its annotation, {annotation}")
        # torch's modules take layouts with and without a batch
        shapes = [x.replace("...", "B N" if name == "query" else "B M") for x in shapes]
        written = [f"[{', '.join(shape.split())}]" for shape in shapes]
        missing += [f"{x} of {name}" for x in written if x not in documentation]
    return missing + ([] if "floating" in documentation else ["the dtypes"])


def test_shapes_and_types_of_queries_keys_and_values_are_told():
    """In the signature and in the docstring of all that is public, which the API page shows."""
    walked = {path: untold(function, taken) for path, function, taken in callables()}
    assert {"lln.attention", "lln.which", "lln.nn.LLNAttention.forward", "lln.prefill"} <= {*walked}
    assert {"lln.distributed.attention", "lln.moments.measure_scales"} <= {*walked}
    assert len(walked) >= 25
    assert not {path: missing for path, missing in walked.items() if missing}


# how much there is -----------------------------------------------------------------------------

# Arguments of what is called most: many more than SDPA's mean that an object is missing.
MOST_ARGUMENTS = {"attention": 16, "LLNAttention": 23, "LLNMultiheadAttention": 26}
# Files of lln in which a word stands, and of those the ones outside of the window's own folder.
MOST_FILES = {
    "overlap": (34, 12),
    "sinks": (28, 12),
    "sharpness": (8, 8),
    "center_keys": (9, 9),
    "learn_scale": (6, 6),
    "feature_map": (12, 12),
}


def test_arguments_stay_few():
    called = {"attention": lln.attention, "LLNAttention": LLNAttention}
    called["LLNMultiheadAttention"] = LLNMultiheadAttention
    found = {name: len(inspect.signature(each).parameters) for name, each in called.items()}
    print(found)
    assert all(found[name] <= most for name, most in MOST_ARGUMENTS.items()), found


def test_an_option_stands_in_few_files():
    """A feature costs its own folder: beyond it options are passed on inside an object."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "lln").rglob("*.py")}
    window = ROOT / "lln" / "ops" / "window"
    found = {}
    for word in MOST_FILES:
        files = [path for path, text in texts.items() if re.search(rf"\b{word}\b", text)]
        found[word] = len(files), sum(not path.is_relative_to(window) for path in files)
        print(f"{word:12} {found[word][0]:3} files, {found[word][1]:3} beyond the window's folder")
    over = {word: n for word, n in found.items() if any(map(int.__gt__, n, MOST_FILES[word]))}
    assert not over
