"""What several test modules share; on the import path through pyproject.toml."""
