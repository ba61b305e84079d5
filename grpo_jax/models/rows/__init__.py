"""Rows of tokens: their layout, and the pieces in which a batch of them is computed."""
