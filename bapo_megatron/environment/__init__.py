"""Multi-turn environments: tasks, turns and steps, in worker processes."""
