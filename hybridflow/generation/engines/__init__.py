"""What a rollout asks of a generation engine, and engines of others that give it."""
