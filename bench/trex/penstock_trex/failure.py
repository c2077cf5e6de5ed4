"""Errors that end a run, each with its exit code."""

MEASURED, FELL_SHORT, BAD_INPUT, NO_TREX, NO_SERVER = range(5)
# As a shell tells a command that a SIGINT ended.
INTERRUPTED = 130


class Failure(Exception):
    """A one-line message and the exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def bad_input(message):
    return Failure(BAD_INPUT, message)


def interrupted(error):
    """The failure, if this is Ctrl-C. Within a call TRex's client makes an error of its own of it, which only its text tells."""
    if isinstance(error, KeyboardInterrupt) or 'interrupted by a keyboard signal' in str(error):
        return Failure(INTERRUPTED, 'interrupted')
    return None
