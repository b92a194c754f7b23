"""What a command hands to the command line once everything it reads has been found in order."""

from collections.abc import Callable

Job = Callable[[], None]
