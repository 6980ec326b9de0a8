"""Groups of commands whose help says every description in full, in terminals of any width."""

from __future__ import annotations

from typer.core import TyperGroup

NO_LIMIT = 10_000  # letters


class WholeHelp(TyperGroup):
    """Folds the first sentence of a command into lines, where typer would end it with dots."""

    def format_commands(self, ctx, formatter) -> None:
        names = self.list_commands(ctx)
        known = [(name, self.get_command(ctx, name)) for name in names]
        rows = [
            (name, command.get_short_help_str(NO_LIMIT))
            for name, command in known
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
