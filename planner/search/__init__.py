"""The search: bounds, incumbents, the ILP (the only PuLP import) and the choice among configurations."""
