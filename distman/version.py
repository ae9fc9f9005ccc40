"""The version of the package, read by the build and by the roll call alike."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
