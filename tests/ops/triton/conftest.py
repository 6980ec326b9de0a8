"""The kernels run in Triton's interpreter where there is no GPU; nothing is skipped."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import lln.ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Interpreted kernels are slow. `make test` runs the first case of every test but these, which take
# seconds each; `make test-all` and a GPU run all cases of all.
LONG = {
    "test_block_causal": ("test_both_branches", "test_masks_groups_and_unequal_widths"),
    "test_causal": (
        "test_a_state_stands_for_earlier_keys",
        "test_carried_sums_underflow_no_more_than_means",
        "test_causal_lln_diag_with_masks",
        "test_careful_path_with_masks",
        "test_carried_sums_after_a_state",
        "test_carried_sums_with_groups_and_masks",
    ),
    "test_convolution": (
        "test_only_what_is_asked_for",
        "test_opcheck",
        "test_strided_values_and_gradients",
    ),
    "test_flops": ("test_a_convolution_is_a_product_with_its_taps",),
    "test_fused_convolution": (
        "test_compile_keeps_the_op_whole",
        "test_only_what_is_asked_for",
        "test_the_operator_keeps_its_promises",
    ),
    "test_joint": (
        "test_a_scale_of_zero",
        "test_features_of_keys_alone",
        "test_features_that_are_queries_have_no_gradient_of_their_own",
        "test_hidden_keys_may_hold_anything",
        "test_huge_inputs_give_averages_of_values",
        "test_later_keys_may_hold_anything",
        "test_masks_groups_and_sinks_with_features_that_are_queries_and_keys",
        "test_near_keys_alone",
        "test_the_same_call_gives_the_same_bits",
    ),
    "test_launching": ("test_compiled_kernels_get_what_the_binder_gave_them",),
    "test_lln_diag": (
        "test_blocks_without_a_kernel_beside_lln_with_one",
        "test_masked_content_never_matters",
        "test_wide_heads",
    ),
    "test_matching": ("test_measuring_and_matching_in_two_launches_changes_no_bit",),
    "test_next_token": (
        "test_steps_are_rows_of_the_whole",
        "test_the_memory_is_that_of_the_plain_steps",
    ),
    "test_state": ("test_state_and_its_gradients",),
    "test_wide_blocks": (
        "test_any_scale",
        "test_compile_keeps_the_op_whole",
        "test_groups_masks_learned_mix",
        "test_masked_content_never_matters",
        "test_softmax_of_large_blocks_alone",
        "test_the_operator_keeps_its_promises",
        "test_wide_heads",
    ),
}
# Quick ones, whose cases are all run: files, and tests of other files.
WHOLE = (
    *("test_bounds", "test_devices", "test_matching"),
    "test_fake_results_look_like_real_ones",
    "test_gradients_of_fake_tensors_have_the_shapes_of_what_they_are_of",
    "test_modules_take_the_kernel_where_it_fits",
    "test_refusals_of_blocks_say_why",
    "test_there_are_states_of_the_segments_that_some_block_sees",
    "test_which_tiles_are_whole_and_which_windows_alike",
    "test_widths_of_heads_that_the_kernels_take",
)


def import_interpreted() -> None:
    """Triton reads the variable when it is imported and when a kernel is decorated, not later."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with suppress(ImportError):  # imported at the first launch otherwise
            importlib.import_module("triton.experimental.gluon")
        for module in pkgutil.walk_packages(lln.ops.__path__, "lln.ops."):
            if ".kernels." in module.name:
                importlib.import_module(module.name)
    finally:
        del os.environ["TRITON_INTERPRET"]  # the dispatch of other tests must not see it


if DEVICE == "cpu":
    import_interpreted()


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def no_kernel_leaves_its_tensors() -> Iterator[None]:
    """Of the interpreter; a GPU would notice only by chance."""
    if DEVICE != "cpu":
        yield
        return
    from tests.ops.triton.bounds import guarded

    with guarded():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NumPy warns of the infinities that the interpreter meets on purpose; where there is a GPU the
    same tests belong to ``make test-gpu``."""
    _leave_most_cases_to_test_all(items)
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    # the first backward pass of a process may meet a thread that has no context yet
    context = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(quiet)
            if DEVICE == "cuda":
                item.add_marker(pytest.mark.gpu)
                item.add_marker(context)


def _leave_most_cases_to_test_all(items: list[pytest.Item]) -> None:
    here, seen = Path(__file__).parent, set()
    for item in items:
        if here not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        name = item.path.stem, item.originalname
        is_long = item.originalname in LONG.get(item.path.stem, ())
        is_whole = item.path.stem in WHOLE or item.originalname in WHOLE
        if is_long or (name in seen and not is_whole):
            item.add_marker(pytest.mark.slow)
        seen.add(name)
