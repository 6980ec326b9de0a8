"""Imports point one way: the layer table of the project, checked on the syntax trees."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, STUDY_PACKAGE = ROOT / "lln", ROOT / "lln_study"

# layer -> layers it may import; "study" is lln_study, the experiments: nothing of lln imports it,
# the command asks by name whether it is there.
LIBRARY: dict[str, set[str]] = {
    "records": set(),
    "device": set(),
    "protocols": set(),
    "mechanisms": set(),
    "ops": {"protocols"},
    "moments": {"ops", "protocols"},
    "distributed": {"moments", "ops", "protocols"},
    "functional": {"distributed", "ops", "moments", "protocols"},
    "instruments": {"mechanisms", "ops", "moments", "protocols", "records"},
    "nn": {"functional", "distributed", "ops", "moments", "protocols"},
    "baselines": {"functional", "ops", "moments", "protocols"},
    "zoo": {"nn", "baselines", "mechanisms", "ops"},
    "hf": {
        *("device", "zoo", "mechanisms", "nn", "functional", "moments", "ops", "instruments"),
        *("protocols", "records"),
    },
    "onnx": {"hf", "functional", "nn", "ops", "protocols"},
    "report": set(),
    "texts": {"records"},
    "inspect": {
        *("report", "texts", "device", "hf", "instruments", "moments", "ops", "records"),
    },
    "conversion": {
        *("inspect", "report", "texts", "device", "hf", "instruments", "nn", "ops", "records"),
    },
    "cli": {
        *("conversion", "inspect", "report", "zoo", "nn", "onnx", "instruments", "records"),
    },
}
# Tables, plots and pages never import what is being judged: they are made from rows.
STUDY: dict[str, set[str]] = {
    "study.sweep_files": set(),
    "study.paper": {"records"},
    "study.paper.tables": {"study.paper", "study.sweep_files", "report", "records"},
    "study.train": {"device", "instruments", "records", "report"},
    "study.data": {"texts", "device", "records"},
    "study.tasks": {
        *("study.data", "study.train", "texts", "hf", "zoo", "nn", "functional", "records"),
        *("conversion", "report"),
    },
    "study.sweep": {"study.sweep_files", "study.tasks", "study.data", "study.train", "records"},
    "study.bench": {
        *("report", "functional", "nn", "zoo", "hf", "mechanisms", "moments", "ops"),
        *("instruments", "protocols", "records", "device"),
    },
    "study.paper.figures": {
        "study.sweep_files",
        *("study.bench", "study.data", "study.paper", "study.paper.tables", "report", "texts"),
        *("device", "functional", "hf", "inspect", "instruments", "moments", "nn", "ops"),
        "records",
    },
    "study.paper.pages": {
        "study.sweep_files",
        *("study.paper", "study.paper.tables", "study.paper.figures"),
        *("report", "records", "nn"),
    },
    "study.paper.report": {"study.paper", "study.paper.tables", "study.paper.figures", "report"},
    "study.demo": {
        *("study.bench", "study.tasks", "study.data", "study.train", "report", "texts"),
        *("study.paper.figures", "device", "records"),
    },
}
STUDY["study.cli"] = {*STUDY, "cli", "nn", "records", "report", "texts", "zoo"}
LAYERS = {**LIBRARY, **STUDY}

# layer -> third-party packages it may import at all
ALWAYS_PRESENT = {"torch", "numpy", "jaxtyping"}
TRAINING = {"transformers", "safetensors", "tokenizers"}
THIRD_PARTY: dict[str, set[str]] = {
    **dict.fromkeys(LAYERS, ALWAYS_PRESENT),
    "mechanisms": set(),  # `lln list` reads the table, and does not wait for torch
    "hf": ALWAYS_PRESENT | {"transformers", "safetensors", "peft", "sentence_transformers"},
    "onnx": ALWAYS_PRESENT | {"onnx", "onnxscript", "onnxruntime", "transformers"},
    "report": {"matplotlib", "jinja2", "markupsafe", "rich"},
    "texts": ALWAYS_PRESENT,
    "study.paper": set(),
    "study.paper.tables": set(),
    "study.paper.figures": ALWAYS_PRESENT | {"rich"},
    "study.paper.pages": set(),
    "study.paper.report": set(),
    "study.train": ALWAYS_PRESENT | TRAINING | {"rich", "tensorboard"},
    "study.data": ALWAYS_PRESENT | TRAINING | {"rich", "PIL", "sklearn"},
    "study.tasks": ALWAYS_PRESENT | TRAINING | {"rich", "sklearn", "scipy"},
    "study.sweep": ALWAYS_PRESENT | {"rich", "ray"},
    "study.bench": ALWAYS_PRESENT | {"rich", "triton", "transformers", "fla"},
    "inspect": ALWAYS_PRESENT | {"rich", "transformers"},
    "conversion": ALWAYS_PRESENT | {"rich", "scipy", "transformers"},
    "study.demo": ALWAYS_PRESENT | {"rich"},
    "cli": {"typer", "rich"},
    "study.cli": {"typer", "rich"},
}

# Files that load only on demand and therefore may import an extra at their top.
EXTRAS_AT_THE_TOP = {
    "cli/app.py": {"typer"},
    "cli/convert.py": {"typer"},
    "cli/export.py": {"typer"},
    "cli/options.py": {"typer"},
    "cli/places.py": {"typer"},
    "cli/running.py": {"typer"},
    "cli/whole_help.py": {"typer"},
    "study/cli/__init__.py": {"typer"},
    "study/cli/bench.py": {"typer"},
    "study/cli/classify.py": {"typer"},
    "study/cli/paper.py": {"typer"},
    "study/cli/settings.py": {"typer"},
    "study/cli/train.py": {"typer"},
    "study/bench/commits.py": {"rich"},
    "study/bench/cpu.py": {"rich"},
    "study/bench/gpu.py": {"rich"},
    "study/bench/host.py": {"rich"},
    "study/bench/serving.py": {"rich"},
    "study/bench/terminal.py": {"rich"},
    "study/bench/zoo.py": {"rich"},
    "study/bench/kernels/resources.py": {"rich"},
    "study/bench/kernels/tiles.py": {"rich"},
    "study/demo/run.py": {"rich"},
    "inspect/run.py": {"rich"},
    "study/paper/figures/run.py": {"rich"},
}
FAMILIES = ("common", "linear", "causal", "window", "taps", "moments")
# Folders that exist for one package, and that nothing else imports unless it is wanted.
FOLDERS_OF = {
    **{f"ops/{family}/kernels/": {"triton"} for family in FAMILIES},
    "hf/": {"transformers"},
    "onnx/": {"onnx", "onnxscript"},
    "ops/common/onnx/": {"onnxscript"},
    **{f"ops/{family}/onnx.py": {"onnxscript"} for family in FAMILIES},
}


def modules() -> list[Path]:
    found = [*PACKAGE.rglob("*.py"), *STUDY_PACKAGE.rglob("*.py")]
    return sorted(path for path in found if path.parent.parent != ROOT or path.stem != "__init__")


def layer_of(module: str) -> str | None:
    """The layer of a dotted name: the longest entry of the table that it begins with."""
    package, *parts = module.split(".")
    parts = ["study", *parts] if package == "lln_study" else parts if package == "lln" else []
    begun = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in begun if name in LAYERS), None)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def place_of(path: Path) -> str:
    """As the tables of packages have it."""
    found = path.relative_to(ROOT).as_posix()
    return found.replace("lln_study/", "study/", 1).removeprefix("lln/")


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
    assert not lost, f"not in the table: {lost}"
    assert set(LAYERS) == set(THIRD_PARTY)


def test_the_library_does_not_know_the_study():
    for layer, below in LIBRARY.items():
        assert below <= set(LIBRARY), layer


def test_the_table_has_no_cycle():
    graphlib.TopologicalSorter(LAYERS).prepare()


def test_no_file_is_imported_by_what_it_imports():
    files = {name_of(path).removesuffix(".__init__"): path for path in modules()}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for own, path in files.items():
        for name, at_once in imports(path):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if at_once and name and name != own:
                graph[own].add(name)
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["conversion", "serving"])
def test_attention_of_transformers_does_not_know_what_is_built_on_it(folder: str):
    above = f"lln.hf.{folder}."
    files = [path for path in (PACKAGE / "hf").glob("*.py") if path.stem != "__init__"]
    files += (PACKAGE / "hf" / "decode").glob("*.py")
    found = [
        place_of(path) for path in files for name, _ in imports(path) if name.startswith(above)
    ]
    assert not found


@pytest.mark.parametrize("path", modules(), ids=place_of)
def test_imports_point_down_and_packages_stay_in_their_layer(path: Path):
    found = list(imports(path))
    check_layers(path, found)
    check_packages(path, found)


def check_layers(path: Path, found: list[tuple[str, bool]]) -> None:
    layer = layer_of(name_of(path))
    for name, _ in found:
        below = layer_of(name)
        if below is not None and layer is not None:
            assert below == layer or below in LAYERS[layer], f"{layer} must not import {name}"


def check_packages(path: Path, found: list[tuple[str, bool]]) -> None:
    inside = place_of(path)
    own = next((own for folder, own in FOLDERS_OF.items() if inside.startswith(folder)), set())
    layer = layer_of(name_of(path))
    allowed = (THIRD_PARTY[layer] if layer else set()) | own
    at_the_top = ALWAYS_PRESENT | own | EXTRAS_AT_THE_TOP.get(inside, set())
    for name, when_imported in found:
        root = name.split(".")[0]
        if root in ("lln", "lln_study") or root in sys.stdlib_module_names:
            continue
        assert root in allowed, f"{inside} must not import {root}"
        assert root in at_the_top or not when_imported, (
            f"{inside} imports {root} at its top: import it where it is used"
        )
