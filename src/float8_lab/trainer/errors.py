"""What can go wrong in the trainer, as exceptions that say what to do about it."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of everything the trainer raises on purpose; its text is written for the user."""


class ConfigError(TrainerError, ValueError):
    """A setting that cannot work: says what it got, what it expected, and what to do."""


class DataError(TrainerError, ValueError):
    """The training data is missing, unreadable, or too small."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, damaged, or belongs to a different run."""


class OtherRankError(TrainerError):
    """Another rank failed; it is that rank which tells the user."""


class LostRankError(OtherRankError):
    """Another rank is gone, maybe without a word."""


class OutOfMemoryError(TrainerError):
    """The device ran out of memory; says which settings lower the need."""


class TrainingDivergedError(TrainerError):
    """The loss or the gradient norm became NaN or infinite; says at which step.

    Attributes:
        step: Number of the first optimizer step, counted from 1, that was not finite.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
