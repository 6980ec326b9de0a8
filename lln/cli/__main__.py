"""``python -m lln.cli``: the `lln` command."""

from lln.cli.app import main

main()
