"""What all tests rest on."""

from __future__ import annotations

import signal

# a shell that starts tests in the background lets them ignore Ctrl-C, and so every command that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
