"""What stands in the way of a start."""


class PreflightError(ValueError):
    """The service cannot be started as asked; the message says why and what to do."""
