"""The `lln` command, a file per group of commands."""
