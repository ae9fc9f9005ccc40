"""Loops of your own: gradients and steps that are the same on any number of ranks."""

from __future__ import annotations

from distman.training._stepper import Stepper

__all__ = ["Stepper"]
