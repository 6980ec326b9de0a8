"""Imports point one way: the layer table of the project, checked on the syntax trees."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lln"

# layer -> layers of lln it may import. "study" holds the experiments: nothing but itself and the
# command imports it.
LIBRARY: dict[str, set[str]] = {
    "records": set(),
    "device": set(),
    "protocols": set(),
    "mechanisms": set(),
    "aliases": set(),
    "ops": {"protocols"},
    "moments": {"aliases", "ops", "protocols"},
    "distributed": {"moments", "ops", "protocols"},
    "functional": {"distributed", "ops", "moments", "protocols"},
    "instruments": {"ops", "moments", "protocols", "records"},
    "nn": {"functional", "distributed", "ops", "moments", "protocols"},
    "baselines": {"functional", "ops", "moments", "protocols"},
    "zoo": {"nn", "baselines", "mechanisms"},
    "hf": {
        *("device", "zoo", "mechanisms", "nn", "functional", "moments", "ops", "instruments"),
        "protocols",
    },
    "onnx": {"hf", "functional", "nn", "ops", "protocols"},
}
# Tables, plots and pages never import what is being judged: they are made from rows.
STUDY: dict[str, set[str]] = {
    "study.plots": set(),
    "study.page": set(),
    "study.paper": {"records"},
    "study.paper.tables": {"study.page", "study.paper", "study.plots", "records"},
    "study.train": {"device", "instruments", "records"},
    "study.data": {"study.train", "device", "records"},
    "study.tasks": {"study.data", "study.train", "hf", "zoo", "records"},
    "study.sweep": {"study.tasks", "study.data", "study.train", "records"},
    "study.bench": {"study.plots", *set(LIBRARY) - {"baselines", "distributed", "onnx"}},
    "study.inspect": {
        *("study.bench", "study.data", "study.page", "study.plots"),
        *("device", "hf", "instruments", "moments", "ops", "records"),
    },
    "study.conversion": {
        *("study.bench", "study.data", "study.inspect", "study.tasks", "study.train"),
        *("study.page", "study.plots", "device", "hf", "instruments", "nn", "records"),
    },
    "study.paper.figures": {
        *("study.bench", "study.data", "study.page", "study.paper", "study.paper.tables"),
        *("study.plots", "device", "functional", "instruments", "moments", "nn", "ops", "records"),
    },
    "study.paper.verify": {
        *("study.paper.figures", "device", "instruments", "moments", "ops", "records"),
    },
    "study.paper.pages": {
        *("study.paper", "study.paper.tables", "study.paper.figures"),
        *("study.page", "study.plots", "records", "nn"),
    },
    "study.demo": {
        *("study.bench", "study.tasks", "study.data", "study.train", "study.page", "study.plots"),
        *("study.paper.figures", "device", "records"),
    },
}
LAYERS = {**LIBRARY, **STUDY, "cli": {*STUDY, "zoo", "nn", "onnx", "instruments", "records"}}

# layer -> third-party packages it may import at all
ALWAYS_PRESENT = {"torch", "numpy", "jaxtyping"}
TRAINING = {"transformers", "safetensors", "tokenizers"}
THIRD_PARTY: dict[str, set[str]] = {
    **dict.fromkeys(LAYERS, ALWAYS_PRESENT),
    "aliases": set(),
    "mechanisms": set(),  # `lln list` reads the table, and does not wait for torch
    "hf": ALWAYS_PRESENT | {"transformers", "safetensors", "peft", "sentence_transformers"},
    "onnx": ALWAYS_PRESENT | {"onnx", "onnxscript", "onnxruntime", "transformers"},
    "study.plots": {"matplotlib"},
    "study.page": {"jinja2", "markupsafe"},
    "study.paper": set(),
    "study.paper.tables": set(),
    "study.paper.figures": ALWAYS_PRESENT | {"rich"},
    "study.paper.verify": ALWAYS_PRESENT | {"rich"},
    "study.paper.pages": set(),
    "study.train": ALWAYS_PRESENT | TRAINING | {"rich", "tensorboard"},
    "study.data": ALWAYS_PRESENT | TRAINING | {"rich", "PIL", "sklearn"},
    "study.tasks": ALWAYS_PRESENT | TRAINING | {"rich", "sklearn", "scipy"},
    "study.sweep": ALWAYS_PRESENT | {"rich", "ray"},
    "study.bench": ALWAYS_PRESENT | {"rich", "triton", "transformers", "fla", "flash_bla"},
    "study.inspect": ALWAYS_PRESENT | {"rich", "transformers"},
    "study.conversion": ALWAYS_PRESENT | {"rich", "transformers"},
    "study.demo": ALWAYS_PRESENT | {"rich"},
    "cli": {"typer", "rich"},
}

# Files that load only on demand and therefore may import an extra at their top.
EXTRAS_AT_THE_TOP = {
    "cli/app.py": {"typer"},
    "cli/bench.py": {"typer"},
    "cli/train.py": {"typer"},
    "cli/settings.py": {"typer"},
    "cli/classify.py": {"typer"},
    "cli/convert.py": {"typer"},
    "cli/export.py": {"typer"},
    "study/bench/cpu.py": {"rich"},
    "study/bench/gpu.py": {"rich"},
    "study/bench/monitor.py": {"rich"},
    "study/bench/serving.py": {"rich"},
    "study/bench/terminal.py": {"rich"},
    "study/bench/zoo.py": {"rich"},
    "study/bench/kernels/first.py": {"rich"},
    "study/bench/kernels/profile.py": {"rich"},
    "study/bench/kernels/resources.py": {"rich"},
    "study/bench/kernels/tiles.py": {"rich"},
    "study/demo/run.py": {"rich"},
    "study/inspect/run.py": {"rich"},
    "study/paper/figures/run.py": {"rich"},
    "study/paper/verify/run.py": {"rich"},
}
# Folders that exist for one package, and that nothing else imports unless it is wanted.
FOLDERS_OF = {
    "ops/triton/": {"triton"},
    "hf/": {"transformers"},
    "onnx/": {"onnx", "onnxscript"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(module: str) -> str | None:
    """The layer of a dotted name inside lln: the longest entry of the table that it begins with."""
    parts = module.split(".")
    begun = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in begun if name in LAYERS), None)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Dotted names a file imports, and whether that happens when the file itself is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the full name, not a relative one"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, id(node) not in inside) for name in names)


def test_every_module_has_its_place():
    lost = [name for path in modules() if layer_of(name := name_of(path)) is None]
    assert lost in ([], ["study.__init__"]), f"not in the table: {lost}"
    assert set(LAYERS) == set(THIRD_PARTY)


def test_the_library_does_not_know_the_study():
    for layer, below in LIBRARY.items():
        assert below <= set(LIBRARY), layer


def test_the_table_has_no_cycle():
    graphlib.TopologicalSorter(LAYERS).prepare()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_and_packages_stay_in_their_layer(path: Path):
    found = list(imports(path))
    check_layers(path, found)
    check_packages(path, found)


def check_layers(path: Path, found: list[tuple[str, bool]]) -> None:
    layer = layer_of(name_of(path))
    for name, _ in found:
        root, _, inside = name.partition(".")
        below = layer_of(inside) if root == "lln" else None
        if below is not None and layer is not None:
            assert below == layer or below in LAYERS[layer], f"{layer} must not import {name}"


def check_packages(path: Path, found: list[tuple[str, bool]]) -> None:
    inside = str(path.relative_to(PACKAGE))
    own = next((own for folder, own in FOLDERS_OF.items() if inside.startswith(folder)), set())
    layer = layer_of(name_of(path))
    allowed = (THIRD_PARTY[layer] if layer else set()) | own
    at_the_top = ALWAYS_PRESENT | own | EXTRAS_AT_THE_TOP.get(inside, set())
    for name, when_imported in found:
        root = name.split(".")[0]
        if root == "lln" or root in sys.stdlib_module_names:
            continue
        assert root in allowed, f"{inside} must not import {root}"
        assert root in at_the_top or not when_imported, (
            f"{inside} imports {root} at its top: import it where it is used"
        )
