"""The command line: instant help, clear refusals, and what the subcommands write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lln
from lln.nn.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lln.cli.app", *arguments], cwd=cwd, capture_output=True, text=True
    )


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "lln_diag"]], ids=str)
def test_static_text_loads_nothing_heavy(arguments):
    code = (
        "import sys; from lln.cli import app\n"
        f"try: app.app({arguments})\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {"torch", "matplotlib", "numpy", "scipy", "jinja2"} & loaded


def test_help_lists_the_commands_in_the_order_a_user_meets_them():
    _, _, listed = in_process("--help").stdout.partition("Commands:\n")
    names = [
        line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    expected = "demo list inspect convert export train sweep table figure report bench"
    assert names == expected.split()
    assert "..." not in listed  # no description is cut


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("group", [[], ["train"], ["bench"]], ids=str)
def test_help_says_every_description_in_full(group, columns):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    said = CliRunner().invoke(cli.app, [*group, "--help"], terminal_width=columns).stdout
    listed = said.partition("Commands:\n")[2]
    assert listed and "..." not in listed
    assert max(map(len, said.splitlines())) <= columns


def test_version():
    assert run("--version").stdout == f"lln {lln.__version__}\n"


def in_process(*arguments: str):
    """Without a second import of torch; enough where no module must stay unloaded."""
    from typer.testing import CliRunner

    from lln.cli import app as cli

    return CliRunner().invoke(cli.app, list(arguments))


def test_list_is_complete():
    done = in_process("list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in lln.list_mechanisms())
    assert "todo" not in done.stdout.lower()


def test_list_tells_what_recommended_stands_for():
    assert "lln list recommended" in in_process("list").stdout
    said = in_process("list", "recommended").stdout
    assert all(place in said for place in PRESETS)
    assert "near=Near(128, overlap=128, sinks=4, joint=True)" in " ".join(said.split())


def test_list_describes_one_mechanism_and_suggests_a_name():
    assert "landmarks=64, iterations=6" in in_process("list", "nystromformer").stdout
    done = in_process("list", "nystromfomer")
    assert done.exit_code == 2 and "did you mean 'nystromformer'" in done.stderr


def test_no_argument_shows_the_help():
    done = run()
    assert "Commands:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--fast"], "--fast"),
        (["bench", "--min-seconds", "x"], "--min-seconds"),
        (["go"], "go"),
    ],
)
def test_what_is_unknown_is_refused(arguments, named):
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr


def test_an_interrupted_training_says_how_to_go_on(capsys):
    import typer

    from lln_study.cli.train import plain_errors

    with pytest.raises(typer.Exit) as end, plain_errors("lln train mlm"):
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert "lln train mlm: interrupted; the same command goes on" in capsys.readouterr().err


def test_what_does_not_exist_is_named(tmp_path):
    done = in_process("report", "--results", str(tmp_path / "nowhere"))
    assert done.exit_code == 2 and "nowhere is not a folder" in " ".join(done.stderr.split())
    done = in_process("sweep", str(tmp_path / "none.json"))
    assert done.exit_code and "none.json does not exist" in done.output + str(done.exception)


def _options(command, path=()):
    """All options of a command and of those below it, each with the words that lead to it."""
    yield from ((path, option) for option in command.params if option.opts[0].startswith("--"))
    for name, below in getattr(command, "commands", {}).items():
        yield from _options(below, (*path, name))


def test_a_file_for_a_folder_is_refused_before_any_work(tmp_path):
    import typer

    from lln.cli import app as cli

    file = tmp_path / "rows.jsonl"
    file.touch()
    options = list(_options(typer.main.get_command(cli.app)))
    found = {"Folder": 0, "File": 0}
    for path, option in options:
        word = (option.help or "").split(" ")[0]
        if word not in found or "npz" in option.help or "Folder or file" in option.help:
            continue
        found[word] += 1
        wrong = file if word == "Folder" else tmp_path
        done = in_process(*path, option.opts[0], str(wrong))
        assert done.exit_code == 2, (path, option.opts)
        said = " ".join(done.stderr.split())
        assert f"'{option.opts[0]}'" in said and f"{wrong}' is a " in said, (path, said)
    assert found["Folder"] > 15 and found["File"] > 3


def test_bench_writes_rows_and_prints_ratios(tmp_path, monkeypatch):
    from lln_study.bench import cpu, sweep
    from lln_study.bench.cases import Case

    small = [
        Case("bidirectional", impl, N, H=1, D=8) for impl in ("sdpa", "eager") for N in (64, 128)
    ]
    monkeypatch.setattr(cpu, "cpu_cases", lambda **_: small)
    monkeypatch.setattr(sweep, "peaks", lambda cases: (2.0**n for n, _ in enumerate(cases)))
    as_json, as_csv, svg = cpu.run(tmp_path, min_seconds=0.01)
    content = json.loads(as_json.read_text())
    assert [row["N"] for row in content["ratios"]] == [64, 128]
    assert len(as_csv.read_text().splitlines()) == 5
    assert svg.read_text().startswith("<svg ")


def test_bench_stops_with_status_1_when_an_answer_is_wrong(tmp_path, monkeypatch, capsys):
    from lln_study.bench import cases, cpu

    monkeypatch.setitem(cases.RUNNERS, ("bidirectional", "sdpa"), lambda q, k, v: v)
    wrong = [cases.Case("bidirectional", "sdpa", 64, D=8)]
    monkeypatch.setattr(cpu, "cpu_cases", lambda **_: wrong)
    with pytest.raises(SystemExit) as end:
        cpu.run(tmp_path)
    assert end.value.code == 1
    assert "stopped before measuring" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
