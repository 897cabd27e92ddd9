"""Plans pipeline-parallel training, proves the plan, and runs it.

The folders are the data's way: profile -> graph -> search (schedules, simulate) -> plan -> runtime | report | exchange.
"""

__version__ = "0.1.0"
