"""The plan, its file format, and the check of a plan that a person edited."""
