"""Rewards on the host: what a completion earns."""
