"""``python -m planner``."""

from planner.cli.main import main

main()
