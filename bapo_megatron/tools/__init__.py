"""What surrounds training and is not part of it; imported by ``commands/`` only."""
