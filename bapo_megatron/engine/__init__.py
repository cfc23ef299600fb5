"""Engines, which sample: their interface (``base``), and one folder for each kind."""
