"""What a command hands to the command line once everything it reads has been found in order."""

from collections.abc import Callable

EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: it was asked to stop before its end, and what it has is kept
Job = Callable[[], int | None]  # an exit code; None is 0
