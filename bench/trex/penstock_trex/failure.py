"""Errors that end a run, each with its exit code."""

MEASURED, FELL_SHORT, BAD_INPUT, NO_TREX, NO_SERVER = range(5)


class Failure(Exception):
    """A one-line message and the exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def bad_input(message):
    return Failure(BAD_INPUT, message)
