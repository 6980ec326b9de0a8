"""A result row and where it is kept: rows of JSON, facts of the machine, files written at once."""
