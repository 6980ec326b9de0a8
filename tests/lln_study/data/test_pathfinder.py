"""Pathfinder: what an image holds, where its ends are, and that it is no trivial task."""

from __future__ import annotations

import numpy as np
import pytest

from lln_study.data.arena import pathfinder

# Of 1,102 images of the published algorithm, made one by one by a program that shares nothing with
# ours: mean and standard deviation over images.
PUBLISHED = {
    "lit": (347.4, 40.3),
    "bright": (128.4, 13.2),
    "gray": (20.17, 2.09),
}


@pytest.fixture(scope="module")
def scene():
    generator = np.random.default_rng([5, 0])
    found = pathfinder._two_contours(generator, 1500)
    return pathfinder._with_distractors(generator, found)


@pytest.fixture(scope="module")
def some() -> dict[str, np.ndarray]:
    return pathfinder.make(np.random.default_rng([5, 1]), 300)


def test_images_and_balanced_labels(some):
    assert some["tokens"].shape == (300, 1024) and some["tokens"].dtype == np.uint8
    assert some["labels"].sum() == 150
    assert (some["tokens"].max(1) == 255).all()


def test_the_same_generator_makes_the_same_images(some):
    again = pathfinder.make(np.random.default_rng([5, 1]), 300)
    np.testing.assert_array_equal(again["tokens"], some["tokens"])


@pytest.mark.parametrize("fact", PUBLISHED)
def test_images_are_as_full_and_as_bright_as_published_ones(some, fact):
    """First paddles in all directions would give 178 bright pixels, and a far harder task."""
    tokens = some["tokens"]
    measured = {
        "lit": (tokens > 0).sum(1),
        "bright": (tokens > 64).sum(1),
        "gray": tokens.mean(1),
    }[fact]
    mean, deviation = PUBLISHED[fact]
    error = deviation * np.sqrt(1 / len(tokens) + 1 / 1102)
    assert abs(measured.mean() - mean) < 4 * error


def test_pivots_are_rounded_up_and_ends_down():
    shapes = pathfinder._get_shapes()
    exact = 4 * np.stack([np.sin(shapes.angles), np.cos(shapes.angles)], 1)
    assert ((shapes.steps - exact > -1e-9) & (shapes.steps - exact < 1)).all()
    angle = np.arange(0, 2 * np.pi, 1 / 3)
    circle = 3 * np.stack([np.sin(angle), np.cos(angle)], 1)
    assert {tuple(end) for end in shapes.ends} == {tuple(end) for end in np.floor(circle)}


def test_few_directions_are_left_for_the_first_paddle():
    degrees = np.flatnonzero(pathfinder._get_shapes().usable) - 180
    assert degrees.min() == -150 and degrees.max() in (-121, -120)


def test_ends_are_where_contours_begin_and_end(scene):
    assert len(scene) > 20
    for pixels in (scene.inner, scene.outer):
        assert (pixels >= 0).all() and (pixels < pathfinder.SIDE).all()
        at = pathfinder._flat(pixels)
        light = scene.image[np.arange(len(scene))[:, None], at]
        assert (light > 0).all()  # a paddle ends there
    apart = np.linalg.norm(scene.inner[:, 0] - scene.inner[:, 1], axis=-1)
    np.testing.assert_allclose(apart, pathfinder.SEED_DISTANCE, atol=0.75)


def test_both_contours_are_complete_and_do_not_run_over_each_other():
    """Light adds up paddle by paddle where paddles do not cover each other."""
    scene = pathfinder._two_contours(np.random.default_rng([5, 2]), 1500)
    line = pathfinder._get_shapes().lines.sum(1).mean() / pathfinder.FULL * pathfinder.CONTRAST
    light = scene.image.sum(1) / line
    assert (light > 0.75 * 2 * pathfinder.CONTOUR).all()
    assert (light < 1.1 * 2 * pathfinder.CONTOUR).all()


def test_distractors_add_light_and_take_room(scene):
    bare = pathfinder._two_contours(np.random.default_rng([5, 0]), 1500)
    assert len(bare) == len(scene)
    assert (scene.image >= bare.image).all() and (scene.blocked >= bare.blocked).all()
    more = (scene.image != bare.image).any(1)
    assert more.mean() > 0.5  # most images have room for some
    assert (scene.blocked[more] != bare.blocked[more]).any(1).all()


def test_marks_join_one_contour_exactly_if_the_label_is_1(scene):
    few = scene.take(np.arange(20))
    labels = np.arange(20) % 2
    before = few.image.copy()
    pathfinder._mark(np.random.default_rng(0), few, labels)
    shapes = pathfinder._get_shapes()

    def marked(ends: np.ndarray, row: int) -> set[int]:
        places = pathfinder._flat(ends[row])
        light = few.image[row, places[:, None] + shapes.patch]
        return set(np.flatnonzero((light >= shapes.disc - 1e-6).all(1)).tolist())

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
