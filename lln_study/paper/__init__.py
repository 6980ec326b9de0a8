"""The paper's tables, figures, theorems and pages from rows."""
