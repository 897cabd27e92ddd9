"""Model files that ship."""
