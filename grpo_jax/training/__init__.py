"""Turns options into a running method: prepares it, trains phases, and offers both as one object."""
