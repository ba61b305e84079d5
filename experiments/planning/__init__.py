"""What plans on paper need: shapes of published models, and what devices exchange. It comes with a clone."""
