"""ListOps, generated from the published parameters of the Long Range Arena.

A tree of at most 10 levels: a node is an operator with probability 1/4 and otherwise a digit, an
operator has 2 to 10 arguments. Kept are trees of more than 500 and fewer than 2,000 tokens, where
digits, operators and closing brackets count. The answer is the value of the whole, 0 to 9.

    [MAX 2 9 [MIN 4 7 ] 0 ]  ->  9

Trees are grown a level at a time, thousands together: the same distribution as growing each by
recursion, at a hundredth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
PADDING, CLOSE = 0, 15
FIRST_DIGIT, FIRST_OPERATOR = 1, 11
VOCABULARY = ("", *map(str, range(10)), *OPERATORS, "]")
LENGTH = 2000  # of the arrays; sequences are shorter
SIZES = {"train": 96_000, "valid": 2_000, "test": 2_000}

MAX_DEPTH, MAX_ARGUMENTS, OPERATOR_SHARE = 10, 10, 0.25
SHORTEST, LONGEST = 501, 1999
ROOTS = 4096  # grown together


@dataclass
class _Level:
    """The nodes of one depth, of all trees; children of one parent stand side by side."""

    tree: np.ndarray
    kind: np.ndarray  # -1 a digit, otherwise the operator
    arguments: np.ndarray
    value: np.ndarray
    size: np.ndarray  # tokens of the subtree


def make(generator: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """``tokens`` uint8 [count, 2000], padded with 0, and ``labels`` uint8 [count]."""
    found_tokens: list[np.ndarray] = []
    found_labels: list[np.ndarray] = []
    found = 0
    while found < count:
        levels, length = _grow(generator, ROOTS)
        _measure(levels)
        tokens, labels = _write(levels, kept=(length >= SHORTEST) & (length <= LONGEST))
        found_tokens.append(tokens)
        found_labels.append(labels)
        found += len(labels)
    return {
        "tokens": np.concatenate(found_tokens)[:count],
        "labels": np.concatenate(found_labels)[:count],
    }


def _grow(generator: np.random.Generator, roots: int) -> tuple[list[_Level], np.ndarray]:
    """Levels from the root down, and the length of each tree; one that is too long stops there."""
    tree = np.arange(roots)
    length = np.zeros(roots, np.int64)
    levels = []
    for depth in range(1, MAX_DEPTH + 1):
        count = len(tree)
        is_operator = generator.random(count) < (OPERATOR_SHARE if depth < MAX_DEPTH else 0)
        arguments = generator.integers(2, MAX_ARGUMENTS, count, endpoint=True)
        operator = generator.integers(len(OPERATORS), size=count)
        digit = generator.integers(10, size=count)
        np.add.at(length, tree, 1 + is_operator)  # an operator has its closing bracket
        is_operator &= length[tree] <= LONGEST
        level = _Level(
            tree,
            np.where(is_operator, operator, -1),
            np.where(is_operator, arguments, 0),
            digit,
            np.ones(count, np.int64),
        )
        levels.append(level)
        tree = np.repeat(tree, level.arguments)
        if len(tree) == 0:
            break
    return levels, length


def _measure(levels: list[_Level]) -> None:
    """Values and sizes of all subtrees, from the leaves up."""
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        inner = np.flatnonzero(level.arguments)
        if len(inner) == 0:
            continue
        ends = np.cumsum(level.arguments[inner])
        starts = ends - level.arguments[inner]
        level.size[inner] = 2 + np.add.reduceat(below.size, starts)
        values = below.value
        low = np.minimum.reduceat(values, starts)
        high = np.maximum.reduceat(values, starts)
        total = np.add.reduceat(values, starts) % 10
        parent = np.repeat(np.arange(len(inner)), level.arguments[inner])
        ordered = values[np.lexsort((values, parent))]
        # The two in the middle, which are the same one if the number of arguments is odd.
        middle = (ordered[(starts + ends - 1) // 2] + ordered[(starts + ends) // 2]) // 2
        level.value[inner] = np.choose(level.kind[inner], (low, high, middle, total))


def _write(levels: list[_Level], kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and answers of the trees that are kept."""
    root = levels[0]
    row = np.cumsum(kept) - 1
    tokens = np.zeros((int(kept.sum()), LENGTH), np.uint8)
    start = np.zeros(len(root.tree), np.int64)  # where each node of the level begins
    for depth, level in enumerate(levels):
        here = kept[level.tree]
        inner = level.arguments > 0
        word = np.where(inner, FIRST_OPERATOR + level.kind, FIRST_DIGIT + level.value)
        tokens[row[level.tree[here]], start[here]] = word[here]
        closing = here & inner
        tokens[row[level.tree[closing]], (start + level.size - 1)[closing]] = CLOSE
        if depth + 1 == len(levels):
            break
        start = _starts_below(level, start, levels[depth + 1].size)
    return tokens, root.value[kept].astype(np.uint8)


def _starts_below(level: _Level, start: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where the children begin: behind their operator and the siblings before them."""
    before = np.cumsum(sizes) - sizes
    inner = np.flatnonzero(level.arguments)
    counts = level.arguments[inner]
    first = np.cumsum(counts) - counts
    return before + np.repeat(start[inner] + 1 - before[first], counts)


def evaluate(tokens: np.ndarray) -> int:
    """The value of one expression by a stack, independent of how it was made.

    Example:
        >>> evaluate(encode("[MAX 2 9 [MIN 4 7 ] 0 ]"))
        9
    """
    stack: list[tuple[int, list[int]]] = [(-1, [])]
    for token in tokens.tolist():
        if token == PADDING:
            break
        if token == CLOSE:
            operator, values = stack.pop()
            stack[-1][1].append(_apply(operator, values))
        elif token >= FIRST_OPERATOR:
            stack.append((token - FIRST_OPERATOR, []))
        else:
            stack[-1][1].append(token - FIRST_DIGIT)
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError("tokens are not one complete expression: a bracket is missing or left")
    return stack[0][1][0]


def _apply(operator: int, values: list[int]) -> int:
    name = OPERATORS[operator]
    if name == "[SM":
        return sum(values) % 10
    if name == "[MED":
        return int(np.median(values))
    return min(values) if name == "[MIN" else max(values)


def encode(text: str, length: int | None = None) -> np.ndarray:
    """Tokens of an expression; parentheses, which the published files have, are left out."""
    words = text.replace("(", " ").replace(")", " ").split()
    number = {word: index for index, word in enumerate(VOCABULARY)}
    unknown = [word for word in words if word not in number]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no word of ListOps; there are {VOCABULARY[1:]}")
    found = np.array([number[word] for word in words], np.uint8)
    if length is None:
        return found
    out = np.zeros(length, np.uint8)
    out[: min(length, len(found))] = found[:length]
    return out
