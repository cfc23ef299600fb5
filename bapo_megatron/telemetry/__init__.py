"""Metrics, where they are written, and the console with its timers."""
