"""Training phases on fixed data: completions (with or without a teacher), pairs, and ratings."""
