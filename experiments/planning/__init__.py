"""Shapes of published models and exchanges of devices, for plans on paper. It comes with a clone."""
