"""Imports point one way: the layer table of the project, checked on the syntax trees."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lln"

# layer -> layers of lln it may import. The table is the whole plan: some layers do not exist yet.
LAYERS: dict[str, set[str]] = {
    "files": set(),
    "data": set(),
    "protocols": set(),
    "ops": {"protocols"},
    "moments": {"ops", "protocols"},
    "functional": {"ops", "moments", "protocols"},
    "instruments": {"ops", "moments", "protocols", "files"},
    "nn": {"functional", "ops", "moments", "protocols"},
    "baselines": {"functional", "ops", "moments", "protocols"},
    "zoo": {"nn", "baselines", "protocols"},
    "models": {"zoo", "nn", "ops", "instruments", "protocols"},
    "hf": {"zoo", "nn", "functional", "moments", "ops", "instruments", "protocols"},
    "distributed": {"functional", "moments", "ops", "protocols"},
    "report": {"files"},
    "bench": {
        *("zoo", "models", "hf", "functional", "instruments"),
        *("ops", "moments", "report", "files"),
    },
    "demo": {"bench", "experiments", "instruments", "moments", "ops", "report", "files"},
    "figures": {"bench", "instruments", "functional", "moments", "ops", "report", "files", "data"},
    "verify": {"figures", "instruments", "moments", "ops"},
    "inspection": {"bench", "hf", "instruments", "moments", "ops", "report", "files", "data"},
    "experiments": {"bench", "models", "hf", "zoo", "instruments", "data", "files"},
    "cli_bench": {"bench"},
    "cli_train": {"experiments", "nn"},
    "cli_classify": {"cli_train", "experiments"},
    "cli": {
        "cli_bench",
        "cli_train",
        "cli_classify",
        "demo",
        "inspection",
        "bench",
        "figures",
        "verify",
        "zoo",
        "instruments",
        "experiments",
        "report",
        "files",
    },
}

# layer -> third-party packages it may import at all
ALWAYS_PRESENT = {"torch", "numpy", "jaxtyping"}
THIRD_PARTY: dict[str, set[str]] = {
    "files": set(),
    "data": set(),
    "protocols": ALWAYS_PRESENT,
    "ops": ALWAYS_PRESENT,
    "moments": ALWAYS_PRESENT | {"scipy"},
    "functional": ALWAYS_PRESENT,
    "instruments": ALWAYS_PRESENT | {"scipy"},
    "nn": ALWAYS_PRESENT,
    "baselines": ALWAYS_PRESENT,
    "zoo": ALWAYS_PRESENT,
    "models": ALWAYS_PRESENT,
    "hf": ALWAYS_PRESENT | {"transformers", "safetensors"},
    "distributed": ALWAYS_PRESENT,
    "report": {"matplotlib", "jinja2", "markupsafe"},
    "bench": ALWAYS_PRESENT | {"rich", "triton", "transformers"},
    "demo": ALWAYS_PRESENT | {"rich"},
    "inspection": ALWAYS_PRESENT | {"rich", "transformers"},
    "figures": ALWAYS_PRESENT | {"rich"},
    "verify": ALWAYS_PRESENT | {"rich"},
    "experiments": ALWAYS_PRESENT
    | {"transformers", "accelerate", "safetensors", "tokenizers", "sklearn", "scipy", "tensorboard"}
    | {"rich", "PIL"},
    "cli_bench": {"typer"},
    "cli_train": {"typer"},
    "cli_classify": {"typer"},
    "cli": {"typer", "rich"},
}

# Files that load only on demand and therefore may import an extra at their top.
EXTRAS_AT_THE_TOP = {
    "cli.py": {"typer"},
    "cli_bench.py": {"typer"},
    "cli_train.py": {"typer"},
    "cli_classify.py": {"typer"},
    "bench/cpu.py": {"rich"},
    "bench/first.py": {"rich"},
    "bench/gpu.py": {"rich"},
    "bench/monitor.py": {"rich"},
    "bench/resources.py": {"rich"},
    "bench/tiles.py": {"rich"},
    "bench/zoo.py": {"rich"},
    "demo/run.py": {"rich"},
    "inspection/run.py": {"rich"},
    "figures/run.py": {"rich"},
    "verify/run.py": {"rich"},
}
# Folders that exist for one package, and that nothing else imports unless it is wanted.
FOLDERS_OF = {"ops/triton/": {"triton"}, "hf/": {"transformers"}}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert names <= set(LAYERS), f"not in the table: {sorted(names - set(LAYERS))}"
    assert set(LAYERS) == set(THIRD_PARTY)


def test_the_table_has_no_cycle():
    graphlib.TopologicalSorter(LAYERS).prepare()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path):
    layer = layer_of(path)
    for name, _ in imports(path):
        root, *rest = name.split(".")
        if root != "lln" or not rest:
            continue
        if rest[0] in LAYERS:
            assert rest[0] == layer or rest[0] in LAYERS[layer], f"{layer} must not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_packages_stay_in_their_layer(path: Path):
    inside = str(path.relative_to(PACKAGE))
    own = next((own for folder, own in FOLDERS_OF.items() if inside.startswith(folder)), set())
    allowed = THIRD_PARTY[layer_of(path)] | own
    at_the_top = ALWAYS_PRESENT | own | EXTRAS_AT_THE_TOP.get(inside, set())
    for name, when_imported in imports(path):
        root = name.split(".")[0]
        if root == "lln" or root in sys.stdlib_module_names:
            continue
        assert root in allowed, f"{inside} must not import {root}"
        assert root in at_the_top or not when_imported, (
            f"{inside} imports {root} at its top: import it where it is used"
        )
