"""Exceptions that say to the user what to do."""

GET_EXTRAS = "pip install 'float8[cli]', or in a checkout pip install '.[cli]'"


class LabError(Exception):
    """Base of everything this package raises on purpose; its text is written for the user."""

    exit_code = 2  # of the `float8` command: 2 if something about the call is wrong, 1 if it failed


class ConfigError(LabError, ValueError):
    """A setting, or data, that cannot work: says what it got, what it expected, and what to do."""


class CheckpointError(LabError):
    """A checkpoint is missing, damaged, or belongs to a different run."""


class FailedError(LabError):
    """Raised where a call makes sense, but training or a measurement failed."""

    exit_code = 1


class RankFailedError(FailedError):
    """Another rank is gone: it tells why, or died without a word."""
