"""Phases that learn from given examples: completions, with a teacher or without, pairs, and ratings."""
