"""The Long Range Arena: its files, and its tasks that are generated."""
