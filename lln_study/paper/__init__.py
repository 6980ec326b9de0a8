"""The paper's tables, figures and pages from rows."""
