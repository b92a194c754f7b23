"""What `hybridflow reshard` shows: a move of weights between two layouts, counted, and carried out on local ranks."""
