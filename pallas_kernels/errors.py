"""The two ways in which an op refuses a call, both while tracing, before anything runs."""


class ArgumentError(ValueError):
    """An argument's shape, dtype or value is not taken. Names it and says what is allowed."""


class UnsupportedPlatform(NotImplementedError):
    """The implementation asked for by name does not exist on the platform of the program."""
