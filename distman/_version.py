"""The version of the package, read by the build and by the join records."""

VERSION = "0.1.0"
