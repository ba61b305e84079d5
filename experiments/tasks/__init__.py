"""Toy tasks of the experiments, on single characters. They come with a clone of the repository, not with the wheel."""
