"""What everything else of the package may use, and which uses nothing of it."""
