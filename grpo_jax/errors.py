"""What a user can mend."""


class UsageError(ValueError):
    """An option, a file or a task that cannot work, in one sentence that says what to change.

    Programs print it without a traceback; any other error is a defect and keeps its own.
    """
