"""``lln verify``: the statements hold, and a false one would be seen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lln_study.paper import verify
from lln_study.paper.verify.check import Check, Evidence
from lln_study.paper.verify.run import run


@pytest.mark.parametrize("check", verify.CHECKS, ids=lambda check: check.test.__name__)
def test_statement_holds(check):
    evidence = check.test()
    assert evidence.holds, evidence.found
    assert any(character.isdigit() for character in evidence.found), "evidence is numbers"


def test_every_statement_of_the_list_is_there():
    sources = " ".join(check.source for check in verify.CHECKS)
    for wanted in ("3.2", "3.3", "3.4", "Proposition 3.1", "Proposition 4.1", "(28)", "limits"):
        assert wanted in sources
    assert len({check.statement for check in verify.CHECKS}) == len(verify.CHECKS)


def printed(monkeypatch, *checks: Check) -> tuple[bool, str]:
    monkeypatch.setattr("lln_study.paper.verify.run.CHECKS", list(checks))
    stream = io.StringIO()
    return run(Console(file=stream, width=120)), stream.getvalue()


def test_verdicts_are_printed(monkeypatch):
    good = Check("Theorem 1", "P[ij] ≥ 0", lambda: Evidence(True, "smallest 0.1"), "a typo")
    held, text = printed(monkeypatch, good)
    assert held
    for part in ("Theorem 1", "P[ij] ≥ 0", "smallest 0.1", "holds", "a typo", "all 1 statements"):
        assert part in text


def test_a_failure_is_counted_and_ends_the_command_with_1(monkeypatch):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    good = Check("A", "one", lambda: Evidence(True, "1"))
    bad = Check("B", "two", lambda: Evidence(False, "2 > 1"))
    held, text = printed(monkeypatch, good, bad)
    assert not held and "FAILS" in text and "1 of 2 statements failed" in text
    assert CliRunner().invoke(cli.app, ["verify"]).exit_code == 1
    monkeypatch.setattr("lln_study.paper.verify.run.CHECKS", [good])
    assert CliRunner().invoke(cli.app, ["verify"]).exit_code == 0


def test_a_wrong_derivative_is_noticed(monkeypatch):
    """The printed formula of Theorem 3.2, without 1/ln 2, must fail the check."""
    from lln_study.paper.verify import theorems

    correct = theorems._entropy

    def as_printed(x, tau):
        quantity, formula = correct(x, tau)
        return quantity, formula * 0.6931

    monkeypatch.setattr(theorems, "_entropy", as_printed)
    assert not theorems.entropy_increases().holds
