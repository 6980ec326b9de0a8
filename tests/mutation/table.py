"""Which files are changed, and which tests ought to notice."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Minutes of compilation, and runs killed and resumed in other processes.
CHOICE = "not compile and not killed and not export and not opcheck"

OPS = "tests/test_bad_input.py tests/ops/test_against_reference.py tests/ops/test_numerics.py"
CALLS = "tests/test_functional.py tests/test_properties.py"
TILES = f"tests/ops/test_causal_tiles.py {OPS} {CALLS}"
TRITON = "tests/ops/triton"
REGISTERED = f"{TRITON}/test_registration.py"
FAMILIES = ("common", "linear", "causal", "window", "taps", "moments")
KERNELS = (
    f"{REGISTERED} {TRITON}/test_bounds.py {TRITON}/test_state.py {TRITON}/test_bidirectional.py"
)
FUSED = f"{TRITON}/test_fused_convolution.py"
CONV = "tests/nn/test_conv.py"
CONVOLUTION = f"tests/ops/test_convolution.py {CONV} tests/nn/test_examples.py"
JOINT = "tests/ops/test_near_far.py tests/test_near_far.py"
ROUTES = f"{TRITON}/test_devices.py {TRITON}/test_promise.py"
BLOCKS = "tests/ops/test_fused_blocks.py"
TRANSFORMS = "tests/ops/test_derivatives.py tests/ops/test_transforms.py"
ONNX = "tests/onnx/test_cores.py"
CORE = "tests/nn/test_attention.py tests/nn/test_running.py tests/nn/test_dropout.py"
MAPS = "tests/nn/test_near_far.py tests/nn/test_maps_of_others.py tests/nn/test_examples.py"
LAYER = "tests/nn/test_multihead.py tests/nn/test_transformer_layers.py"
ENGINE = "tests/lln_study/train/test_engine.py tests/lln_study/train/test_loop.py"
TRAINING = f"{ENGINE} tests/lln_study/train/test_resume.py"
MOMENTS = "tests/moments"
LEVELS = f"{MOMENTS}/test_output_levels.py {MOMENTS}/test_features.py tests/test_near_far.py"
# A file or folder -> its tests; the longest match counts.
TESTS = {
    "lln/functional.py": f"{CALLS} tests/test_bad_input.py tests/test_near_far.py "
    "tests/test_block_causal.py",
    "lln/ops": f"{OPS} {CALLS}",
    "lln/ops/window/fields.py": f"{LEVELS} tests/nn/test_rows.py {JOINT}",
    "lln/ops/window/near.py": f"tests/ops/test_near.py tests/test_near_far.py "
    f"tests/test_block_causal.py {OPS}",
    "lln/ops/window/near_far.py": f"{JOINT} {OPS}",
    "lln/ops/linear/one_token.py": "tests/hf/test_decoding.py",
    "lln/ops/window/eager_lln_diag.py": f"{BLOCKS} {JOINT} tests/nn/test_dropout.py "
    f"tests/ops/test_block_causal.py tests/ops/test_transforms.py {CALLS}",
    "lln/ops/linear/varlen.py": f"{CALLS} tests/test_bad_input.py tests/test_near_far.py",
    "lln/ops/linear/eager_varlen.py": f"{CALLS} tests/test_near_far.py",
    **{f"lln/ops/{family}/onnx.py": ONNX for family in ("linear", "causal", "window")},
    "lln/ops/common/onnx": ONNX,
    "lln/ops/linear/normalized_keys.py": "tests/test_normalized_keys.py",
    **{f"lln/ops/window/eager_{name}.py": JOINT for name in ("near", "far", "near_far")},
    "lln/ops/taps/convolution.py": f"{CONVOLUTION} {TRITON}/test_convolution.py",
    "lln/ops/taps/eager_convolution.py": CONVOLUTION,
    "lln/ops/common/threads.py": "tests/ops/test_threads.py tests/ops/test_unwatched.py",
    "lln/ops/common/unwatched.py": "tests/ops/test_unwatched.py tests/ops/test_transforms.py",
    "lln/ops/reference.py": f"{JOINT} tests/ops/test_block_causal.py {OPS}",
    "lln/ops/window/lln_diag.py": f"{CONV} tests/nn/test_attention.py {BLOCKS} {OPS}",
    "lln/ops/common/arguments.py": f"{OPS} {BLOCKS} {CALLS} {JOINT} "
    f"tests/nn/test_multihead.py {MOMENTS}/test_features.py",
    "lln/ops/common/features.py": f"tests/ops/test_threads.py {OPS} {CALLS}",
    "lln/ops/common/parts.py": f"{JOINT} {OPS} {CALLS}",
    "lln/ops/common/registration.py": f"tests/ops/test_unwatched.py {TRANSFORMS} {OPS}",
    "lln/ops/window/fused_blocks.py": f"{BLOCKS} {OPS}",
    "lln/ops/causal/square.py": TILES,
    "lln/ops/causal/tree.py": TILES,
    "lln/ops/causal/segments.py": TILES,
    "lln/ops/causal/eager_causal.py": TILES,
    "lln/ops/causal/eager_backward.py": TILES,
    "lln/ops/window/kernels/blocks": f"{TRITON}/test_lln_diag.py {REGISTERED}",
    **{f"lln/ops/{family}/kernels": KERNELS for family in FAMILIES},
    "lln/ops/triton.py": f"{ROUTES} {REGISTERED}",
    "lln/ops/common/kernels/tiles.py": f"{ROUTES} {REGISTERED} {TRITON}/test_bidirectional.py "
    f"{TRITON}/test_causal.py tests/nn/test_launches.py {TRITON}/test_wide_blocks.py",
    "lln/ops/common/kernels/launching.py": f"{TRITON}/test_launching.py {TRITON}/test_strides.py "
    f"{TRITON}/test_bidirectional.py",
    "lln/ops/window/kernels/joint": f"{TRITON}/test_joint.py {TRITON}/test_next_token.py",
    "lln/ops/window/kernels/blocks/wide_launch.py": f"{TRITON}/test_wide_blocks.py",
    "lln/ops/taps/kernels/convolution.py": f"{TRITON}/test_convolution.py {FUSED}",
    "lln/ops/causal/kernels/causal.py": f"{TRITON}/test_causal.py {REGISTERED}",
    "lln/ops/causal/kernels/launch.py": f"{TRITON}/test_causal.py {TRITON}/test_prefill.py",
    "lln/ops/window/kernels/blocks/block_diagonal.py": f"{TRITON}/test_lln_diag.py {REGISTERED} "
    f"{TRITON}/test_wide_blocks.py",
    "lln/ops/window/kernels/blocks/causal_average.py": f"{TRITON}/test_causal.py {REGISTERED}",
    "lln/ops/window/kernels/blocks/lln_diag.py": f"{TRITON}/test_lln_diag.py {REGISTERED} {FUSED}",
    "lln/ops/window/kernels/blocks/launch.py": f"{TRITON}/test_lln_diag.py",
    "lln/ops/linear/kernels/varlen.py": f"{TRITON}/test_varlen.py {REGISTERED}",
    "lln/ops/linear/kernels/launch_packed.py": f"{TRITON}/test_varlen.py",
    "lln/ops/linear/kernels/decode.py": f"{TRITON}/test_decode.py {TRITON}/test_prefill.py",
    "lln/ops/moments/kernels/statistics.py": f"{TRITON}/test_statistics.py",
    "lln/ops/moments/kernels/matching.py": f"{TRITON}/test_matching.py",
    "lln/moments": f"{MOMENTS}/test_matching.py {MOMENTS}/test_calibration.py",
    **{
        f"lln/moments/{name}.py": f"{MOMENTS}/test_{name}.py"
        for name in ("features", "line", "quadrature", "slots")
    },
    "lln/moments/curves.py": f"{MOMENTS}/test_curves.py {MOMENTS}/test_matching.py",
    "lln/moments/tabulate.py": f"{MOMENTS}/test_curves.py",
    "lln/moments/matching.py": f"{MOMENTS}/test_matching.py {TRITON}/test_matching.py",
    "lln/moments/statistics.py": f"{MOMENTS}/test_statistics.py {MOMENTS}/test_calibration.py",
    **{f"lln/moments/{name}.py": LEVELS for name in ("levels", "output_levels", "rows")},
    "lln/nn/presets.py": "tests/test_names.py",
    **{
        f"lln/nn/{name}.py": f"tests/nn/test_near_far.py tests/nn/test_rows.py "
        f"tests/nn/test_block_causal.py tests/nn/test_decoder.py {CORE} {LAYER}"
        for name in ("attention", "branches", "draw", "levels", "rows")
    },
    "lln/nn/feature_maps.py": f"{MAPS} tests/test_saved_files.py {CORE}",
    "lln/nn/matching.py": f"{MAPS} {CORE}",
    "lln/nn/stored.py": f"{MAPS} tests/nn/test_running.py tests/nn/test_checkpointing.py "
    "tests/test_saved_files.py",
    "lln/nn/statistics.py": f"{CORE} {LAYER} tests/nn/test_decoder.py {MAPS}",
    "lln/nn/sharded.py": "tests/nn/test_sharded.py tests/distributed/test_mesh.py",
    "lln/nn": f"{CORE} {LAYER} tests/nn/test_meta.py tests/nn/test_conv.py",
    "lln_study/train/engine.py": f"{TRAINING} tests/lln_study/train/test_processes.py",
    "lln_study/train/loop.py": TRAINING,
    "lln_study/train/config.py": TRAINING,
    "lln_study/train/checkpoint.py": TRAINING,
    "lln/records/seeds.py": f"tests/lln_study/train/test_seeds.py {TRAINING}",
}


def killers_of(path: str) -> tuple[str, ...]:
    """The test files of a file of lln."""
    matches = [name for name in TESTS if path == name or path.startswith(f"{name}/")]
    return tuple(dict.fromkeys(TESTS[max(matches, key=len)].split()))


def sources() -> list[Path]:
    """The files that are changed: not those of kernels, which run on a GPU."""
    found: set[Path] = set()
    for name in TESTS:
        found |= {ROOT / name} if name.endswith(".py") else set((ROOT / name).rglob("*.py"))
    return sorted(path for path in found if not path.name.endswith("_kernels.py"))
