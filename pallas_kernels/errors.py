"""The two ways in which a call of an op can be refused. Both are raised while tracing, before anything runs."""


class ArgumentError(ValueError):
    """An argument has a shape, dtype or value the op does not take. Names it and says what is allowed."""


class UnsupportedPlatform(NotImplementedError):
    """The implementation asked for by name does not exist on the platform that the program is for."""
