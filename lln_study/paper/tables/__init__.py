"""The paper's tables, one per file."""
