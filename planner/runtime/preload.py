"""Imported once by the server that a run's processes are forked from, so that none of them imports it anew.

Exporting a model imports half of torch's compiler on its first call, which takes each process seconds.
"""

from __future__ import annotations

import importlib
import signal
from contextlib import suppress

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal: the launcher decides
importlib.import_module("planner.runtime.worker")

_USED_BY_EXPORT = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.symbolic_shapes",
    "torch._export.utils",
    "torch._export.non_strict_utils",
    "torch.export._trace",
)

for _name in _USED_BY_EXPORT:
    with suppress(ImportError):  # torch's own affair, and another one in each version
        importlib.import_module(_name)
