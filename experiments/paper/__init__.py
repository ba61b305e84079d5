"""A run on paper: programs compiled from shapes alone, and what is read of them."""
