"""Pathfinder: what an image holds, where its ends are, and that it is no trivial task."""

from __future__ import annotations

import numpy as np
import pytest

from lln.experiments.data import pathfinder


@pytest.fixture(scope="module")
def scene():
    generator = np.random.default_rng([5, 0])
    found = pathfinder._two_contours(generator, 1500)
    return pathfinder._with_distractors(generator, found)


@pytest.fixture(scope="module")
def some() -> dict[str, np.ndarray]:
    return pathfinder.make(np.random.default_rng([5, 1]), 120)


def test_images_and_balanced_labels(some):
    assert some["tokens"].shape == (120, 1024) and some["tokens"].dtype == np.uint8
    assert some["labels"].sum() == 60
    assert some["tokens"].max() == 255
    assert 0.1 < (some["tokens"] > 0).mean() < 0.4


def test_the_same_generator_makes_the_same_images(some):
    again = pathfinder.make(np.random.default_rng([5, 1]), 120)
    np.testing.assert_array_equal(again["tokens"], some["tokens"])


def test_ends_are_where_contours_begin_and_end(scene):
    assert len(scene) > 20
    for pixels in (scene.inner, scene.outer):
        assert (pixels >= 0).all() and (pixels < pathfinder.SIDE).all()
        at = pathfinder._flat(pixels)
        light = scene.image[np.arange(len(scene))[:, None], at]
        assert (light > 0).all()  # a paddle ends there
    apart = np.linalg.norm(scene.inner[:, 0] - scene.inner[:, 1], axis=-1)
    np.testing.assert_allclose(apart, pathfinder.SEED_DISTANCE, atol=0.75)


def test_both_contours_are_complete_and_do_not_run_over_each_other(scene):
    """Light adds up paddle by paddle: two long contours, and at most five short ones."""
    line = pathfinder._get_shapes().lines.sum(1).mean()
    window = scene.image.reshape(-1, pathfinder.GRID, pathfinder.GRID)
    light = window.sum((1, 2)) / line
    targets = 2 * pathfinder.CONTOUR * pathfinder.CONTRAST
    distractors = 5 * pathfinder.DISTRACTOR * pathfinder.DISTRACTOR_CONTRAST
    assert (light > 0.85 * targets).all()
    assert (light < 1.1 * (targets + distractors)).all()


def test_no_paddle_leaves_the_window(scene):
    grid = scene.image.reshape(-1, pathfinder.GRID, pathfinder.GRID).copy()
    edge = pathfinder.EDGE
    grid[:, edge:-edge, edge:-edge] = 0
    assert (grid == 0).all()


def test_marks_join_one_contour_exactly_if_the_label_is_1(scene):
    few = scene.take(np.arange(20))
    labels = np.arange(20) % 2
    before = few.image.copy()
    pathfinder._mark(np.random.default_rng(0), few, labels)
    cross = pathfinder._get_shapes().cross

    def marked(ends: np.ndarray, row: int) -> set[int]:
        places = pathfinder._flat(ends[row])
        return {one for one in (0, 1) if (few.image[row, places[one] + cross] > 0.9).all()}

    decided = 0
    for row in range(20):
        start, stop = marked(few.inner, row), marked(few.outer, row)
        if len(start) == len(stop) == 1:  # discs far from the other ends
            assert (start == stop) == bool(labels[row])
            decided += 1
    assert decided >= 10
    assert (few.image >= before).all()


def test_brightness_does_not_tell_the_label(some):
    """The means of both classes differ by less than chance allows."""
    light = some["tokens"].astype(float).mean(1)
    one, other = light[some["labels"] == 1], light[some["labels"] == 0]
    error = np.sqrt(one.var() / len(one) + other.var() / len(other))
    assert abs(one.mean() - other.mean()) < 3 * error
