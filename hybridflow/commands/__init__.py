"""What the command line runs, one module a command: each takes a checked config and does the whole job."""
