"""The parts of the manager."""
