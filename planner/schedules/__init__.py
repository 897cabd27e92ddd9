"""Schedules, one a file, each a pure function that gives every rank its actions; and the check of any table."""
