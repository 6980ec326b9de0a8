"""Statistics of queries and keys, and the match of α and β, in two launches."""
