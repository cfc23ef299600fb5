"""Metrics, timers, sinks and figures."""
