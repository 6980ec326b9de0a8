"""The mutation runner: what is changed, that it still parses, and that it is taken back."""

from __future__ import annotations

import ast
import collections
import json

import pytest

from tests.mutation import stored as stored_changes
from tests.mutation import tree as trees
from tests.mutation.mutants import draw, mutants_of
from tests.mutation.table import ROOT, TESTS, killers_of, sources
from tests.mutation.tree import Tree, within

SOURCE = '''
"""Words 1."""
from typing import TYPE_CHECKING
__all__ = ["f"]
if TYPE_CHECKING:
    limit = 7

@overload
def f(x: int, deep=False): ...
@decorated(9)
def f(x: Array["3"], *, deep: bool = True) -> int:
    """Words 2."""
    if x < 2 and deep:
        raise ValueError(f"{x + 5}")
    self.count += 1
    shallow = not deep
    y = g(-x, scale=0.5, device=x)
    return x * y
'''


def found(tmp_path, source=SOURCE):
    (tmp_path / "m.py").write_text(source)
    return mutants_of(tmp_path, tmp_path / "m.py")


def test_code_is_changed_and_words_are_not(tmp_path):
    changes = {(m.operator, m.before, m.after) for m in found(tmp_path)}
    test = "x < 2 and deep"
    assert changes == {
        ("boolean", "True", "False"),
        ("not", test, f"(not ({test}))"),
        ("and/or", test, "(x < 2 or deep)"),
        ("comparison", "x < 2", "(x <= 2)"),
        ("comparison", "x < 2", "(x >= 2)"),
        ("integer", "2", "3"),
        ("integer", "2", "1"),
        ("not", "not deep", "(deep)"),
        ("raise", 'raise ValueError(f"{x + 5}")', "pass"),
        ("statement", "self.count += 1", "pass"),
        ("arithmetic", "self.count += 1", "self.count -= 1"),
        ("integer", "1", "2"),
        ("integer", "1", "0"),
        ("argument", "g(-x, scale=0.5, device=x)", "(g(-x, device=x))"),
        ("sign", "-x", "(x)"),
        ("float", "0.5", "1.0"),
        ("return", "return x * y", "return None"),
        ("arithmetic", "x * y", "(x / y)"),
    }


@pytest.mark.slow
def test_every_change_parses_and_is_another_program():
    path = ROOT / "lln" / "ops" / "reference.py"
    source, mutants = path.read_bytes(), mutants_of(ROOT, path)
    before = ast.dump(ast.parse(source))
    drawn = list(draw(mutants, 0))[:100]  # even: of every operator some
    assert {mutant.operator for mutant in drawn} == {mutant.operator for mutant in mutants}
    for mutant in drawn:
        assert ast.dump(ast.parse(mutant.apply(source))) != before, mutant


def test_a_draw_is_repeatable_and_even():
    mutants = mutants_of(ROOT, ROOT / "lln" / "functional.py")
    first = list(draw(mutants, 3))
    assert first == list(draw(mutants, 3)) != list(draw(mutants, 4))
    assert sorted(m.key for m in first) == sorted(m.key for m in mutants)
    operators = collections.Counter(m.operator for m in first[:8])
    assert max(operators.values()) == 1


def test_every_entry_of_the_table_exists_and_every_source_has_tests():
    assert all((ROOT / name).exists() for name in TESTS)
    assert len(sources()) > 40
    for path in sources():
        files = killers_of(path.relative_to(ROOT).as_posix())
        assert files and all((ROOT / file).exists() for file in files)


def test_the_quickest_tests_that_fit_are_chosen():
    costs = {"a.py::slow": 9.0, "a.py::quick": 0.1, "b.py::other": 0.0, "a.py::middle": 1.0}
    assert within(2.0, ["a.py"], costs) == ["a.py::quick", "a.py::middle"]
    cases = {f"a.py::cases[{case}]": 0.4 for case in range(4)}
    assert within(1.9, ["a.py"], {**costs, **cases}) == [
        "a.py::quick", "a.py::cases[0]", "a.py::cases[1]", "a.py::middle",
    ]  # fmt: skip


@pytest.mark.parametrize("failed", [None, "tests/a.py::test", KeyboardInterrupt])
def test_a_change_is_taken_back_whatever_happens(tmp_path, monkeypatch, failed):
    monkeypatch.setattr(trees, "COPIED", ("pyproject.toml",))
    tree = Tree(tmp_path)
    path = tmp_path / "lln" / "functional.py"
    path.parent.mkdir()
    path.write_bytes((ROOT / "lln" / "functional.py").read_bytes())
    mutant = mutants_of(tmp_path, path)[0]
    seen = []

    def test(files, order, limit):
        seen.append(path.read_bytes())
        if failed is KeyboardInterrupt:
            raise failed
        return {"verdict": "killed" if failed else "survived", "failed": failed}

    monkeypatch.setattr(tree, "test", test)
    source = path.read_bytes()
    if failed is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            tree.try_out(mutant, {}, 1.0)
    else:
        row = tree.try_out(mutant, {}, 1.0)
        assert row["verdict"] == ("killed" if failed else "survived") and row["by"] == failed
    assert seen == [mutant.apply(source)] and path.read_bytes() == source


def test_stored_changes_are_found_by_their_lines_wherever_they_moved(tmp_path, monkeypatch):
    lines = "def f(x):\n    return x + 1"
    entry = {"path": "lln/old.py", "operator": "integer", "lines": lines, "before": "1"}
    entry |= {"after": "2", "at": lines.index("1")}
    gone = {**entry, "lines": "def g(x):\n    return x + 1"}
    monkeypatch.setattr(stored_changes, "FILE", tmp_path / "stored.json")
    (tmp_path / "stored.json").write_text(json.dumps([entry, gone]))
    (tmp_path / "lln").mkdir()
    new = tmp_path / "lln" / "new.py"
    new.write_text(f"# moved\n{lines}\n")
    (mutant,) = stored_changes.stored(tmp_path)
    assert (mutant.path, mutant.line) == ("lln/new.py", 3)
    assert mutant.apply(new.read_bytes()).decode() == f"# moved\n{lines.replace('1', '2')}\n"
    (tmp_path / "lln" / "copy.py").write_text(lines)  # which of the two was meant is not known
    assert not list(stored_changes.stored(tmp_path))


def test_most_stored_changes_still_apply():
    found = list(stored_changes.stored(ROOT))
    assert len(found) >= 150 and all(killers_of(mutant.path) for mutant in found)
