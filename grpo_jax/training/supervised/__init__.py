"""Phases that learn from given examples: completions, rated pairs, and pairs."""
