"""Rewards of completions, computed on the host."""
