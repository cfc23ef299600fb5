"""Shared basics: files, processes, workers, calls between processes, versions."""
