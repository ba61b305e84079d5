"""Files of models: their formats, names and fields."""
