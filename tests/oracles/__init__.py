"""Independent versions of what the code under test computes; they share no code with it."""
