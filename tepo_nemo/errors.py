"""The errors that end a command, and the exit code of each."""


class UserError(Exception):
    """A mistake in the configuration, the arguments or the files: one line, exit code 2.

    The message names the key or file, its value, and what to do about it.
    """
