"""Importers and exporters for other systems' files."""
