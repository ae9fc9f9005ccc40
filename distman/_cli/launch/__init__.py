"""The command ``distman launch``."""
