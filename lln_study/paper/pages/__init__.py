"""README blocks and the report, written from rows."""
