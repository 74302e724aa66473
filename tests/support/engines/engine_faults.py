"""The error of an engine that was asked to fail."""


class InjectedFault(RuntimeError):
    """Raised by an engine that was asked to fail."""
