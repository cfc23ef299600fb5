"""What a policy meets in an episode: tasks, its turns, and what is written between them."""
