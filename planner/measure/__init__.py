"""Times and memory of layers, links and the optimizer -> profile (torch)."""
