"""The states before every tile of keys: a Scan over the tiles, the only loop of the graphs.

(L, M) of tile t is merged into those before it as :func:`lln.ops.linear.eager_state.merge` does.
"""

from __future__ import annotations

from onnxscript import graph, script

from lln.ops.common.onnx.values import Floats, op


@script(default_opset=op)
def states_before(
    log_mass: Floats, mean: Floats, masses: Floats, means: Floats
) -> tuple[Floats, Floats]:
    """Merge ``[B, H, T, D]`` and ``[B, H, T, D, E]`` from the left, each tile excluded."""

    @graph()
    def step(mass, average, tile_mass, tile_mean):
        higher = op.Max(mass, tile_mass)
        zero = op.CastLike(0.0, higher)
        shift = op.Where(op.IsInf(higher, detect_positive=0), zero, higher)
        mine = op.Exp(mass - shift)
        theirs = op.Exp(tile_mass - shift)
        total = mine + theirs
        some = op.Where(op.Equal(total, zero), op.CastLike(1.0, total), total)
        last = op.Constant(value_ints=[-1])
        share = op.Unsqueeze(mine / some, last) * average
        after = share + op.Unsqueeze(theirs / some, last) * tile_mean
        return shift + op.Log(total), after, op.Identity(mass), op.Identity(average)

    _, _, before, averages = op.Scan(
        log_mass,
        mean,
        masses,
        means,
        body=step,
        num_scan_inputs=2,
        scan_input_axes=[2, 2],
        scan_output_axes=[2, 2],
    )
    return before, averages


@script(default_opset=op)
def states_after(
    log_mass: Floats, mean: Floats, masses: Floats, means: Floats
) -> tuple[Floats, Floats]:
    """Merge the same from the right, each tile excluded."""
    first = op.Constant(value_ints=[-1])
    last = op.Constant(value_ints=[-9223372036854775807])
    tiles = op.Constant(value_ints=[2])
    back_masses = op.Slice(masses, first, last, tiles, first)
    back_means = op.Slice(means, first, last, tiles, first)
    after, averages = states_before(log_mass, mean, back_masses, back_means)
    return op.Slice(after, first, last, tiles, first), op.Slice(averages, first, last, tiles, first)
