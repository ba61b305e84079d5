"""Toy tasks for the experiments. They come with a clone of the repository, not with the wheel."""
