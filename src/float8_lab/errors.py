"""Exceptions that say to the user what to do."""

GET_EXTRAS = "pip install 'float8[cli]', or in a checkout pip install '.[cli]'"


class LabError(Exception):
    """Base of everything this package raises on purpose; its text is written for the user."""

    exit_code = 2  # of the `float8` command: 2 if something about the call is wrong, 1 if it failed


class ConfigError(LabError, ValueError):
    """A setting that cannot work: says what it got, what it expected, and what to do."""


class DataError(LabError, ValueError):
    """The training data is missing, unreadable, or too small."""


class CheckpointError(LabError):
    """A checkpoint is missing, damaged, or belongs to a different run."""


class FailedError(LabError):
    """Raised where a call makes sense, but training or a measurement failed."""

    exit_code = 1


class WrongResultError(FailedError):
    """Raised where code that is to be timed computes something else than its reference."""


class OutOfMemoryError(FailedError):
    """The device ran out of memory; says which settings lower the need."""


class TrainingDivergedError(FailedError):
    """The loss or the gradient norm became NaN or infinite; says at which step."""


class RankFailedError(FailedError):
    """Another rank is gone: it tells why, or died without a word."""
