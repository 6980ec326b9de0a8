"""Run the checks and print a verdict each."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lln.device.threads import one_thread
from lln_study.paper.verify import CHECKS
from lln_study.paper.verify.check import Check, Evidence


def run(console: Console | None = None) -> bool:
    """Print a table of verdicts; True if every statement held."""
    console = console or Console()
    table = Table(title="The paper's statements, checked", title_justify="left", expand=True)
    table.show_lines = True
    table.add_column("source", style="bold", no_wrap=True)
    table.add_column("statement, and what was found", ratio=3)
    table.add_column("verdict", ratio=1)
    failed = 0
    with console.status("checking") as status, one_thread():
        for check in CHECKS:
            status.update(f"{check.source}: {check.statement}")
            evidence = check.test()
            failed += not evidence.holds
            told = f"{escape(check.statement)}\n[dim]{escape(evidence.found)}[/]"
            table.add_row(check.source, told, _verdict(check, evidence))
    console.print(table)
    console.print(
        f"[bold red]{failed} of {len(CHECKS)} statements failed[/]"
        if failed
        else f"[bold green]all {len(CHECKS)} statements hold[/]"
    )
    return not failed


def _verdict(check: Check, evidence: Evidence) -> str:
    if not evidence.holds:
        return "[bold red]FAILS[/]"
    return "[green]holds[/]" + (f"\n[yellow]{escape(check.amended)}[/]" if check.amended else "")
