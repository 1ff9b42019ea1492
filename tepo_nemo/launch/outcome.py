"""Exit codes, and the one line that says why."""

import sys
from enum import IntEnum

ERROR_PREFIX = "tepo-nemo: error: "


class ExitCode(IntEnum):
    """Of every command and of every rank; scripts depend on them."""

    DONE = 0
    FAILED = 1
    MISTAKE = 2  # the user's: configuration, arguments, files
    STOPPED = 3  # by a signal or a time limit, with the state saved


def print_error(message: object) -> None:
    """One line on stderr, whatever the message holds."""
    print(ERROR_PREFIX + " ".join(str(message).split()), file=sys.stderr, flush=True)
