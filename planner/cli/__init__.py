"""Thin Typer commands, one file each; nothing is decided here."""
