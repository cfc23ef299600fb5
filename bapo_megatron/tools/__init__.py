"""Tools around training, which does not import them; used by ``commands/`` only."""
