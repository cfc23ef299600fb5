"""Metrics and their sinks, the console, timers and hang detection."""
