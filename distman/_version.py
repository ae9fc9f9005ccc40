"""The version of the package, read by the build and by the roll call alike."""

VERSION = "0.1.0"
