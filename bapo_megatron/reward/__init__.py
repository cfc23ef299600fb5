"""Scores of finished responses, computed in worker processes with limits."""
