"""Importers and exporters for the formats of other systems."""
