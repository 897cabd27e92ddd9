"""The time model: actions and costs -> timeline and memory."""
