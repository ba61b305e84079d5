"""External engines for sampling: servers of the completions protocol."""
