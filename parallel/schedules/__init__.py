"""Pipeline schedules as data: built, given their messages, proved, simulated and drawn. No tensor, no process group."""
