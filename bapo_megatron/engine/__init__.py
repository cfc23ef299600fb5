"""Engines, which sample: their interface (``base``), and one package per kind."""
