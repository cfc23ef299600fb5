"""What samples: the interface (``base``), and one folder for each kind of engine."""
