"""Properties that refuse to be asked of the class: ``if DistributedManager.is_main`` would be true on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    instance_property = property  # by this name alone do type checkers know what it does
else:

    class instance_property(property):  # noqa: N801 - it stands for property
        """A property that raises where the parentheses of ``DistributedManager()`` were forgotten.

        The error is an AttributeError, so that ``inspect`` and ``help()`` find the property all the same, in the
        dictionary of the class.
        """

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            if instance is not None:
                return super().__get__(instance, owner)
            raise AttributeError(
                f"{self.fget.__name__} must be asked of an instance, got the class {owner.__name__}. Write "
                f"{owner.__name__}().{self.fget.__name__}, with parentheses."
            )
