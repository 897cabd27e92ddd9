"""The state of this machine for pipeplan: Python, packages, solver, torch, backends, GPUs, processes, links, disk.

What may break is asked in child processes (planner.doctor.probe), so that nothing broken takes the command with it and
the command itself imports neither torch nor a solver.
"""

from planner.doctor.checks import CHECKS, Finding, State, examine

__all__ = ["CHECKS", "Finding", "State", "examine"]
