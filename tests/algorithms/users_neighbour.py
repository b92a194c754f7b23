"""What `users_own` imports, as a file beside it."""

SCALE = 2.0
