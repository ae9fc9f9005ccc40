"""The results of each epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distman._base.arguments import check_choice

Record = dict[str, float]


class History:
    """A record of each epoch, the same on all ranks.

    The names in it are ``epoch``, ``loss`` and the metrics, or what a step of your own returns, ``val_loss`` and the
    metrics of the validation, ``lr``, or ``lr_`` and the name of each optimizer, the number of ``skipped`` steps, and
    ``seconds``.

    Args:
        records: The values of each epoch.

    Attributes:
        validations: A record of each validation within an epoch: ``epoch``, ``step``, ``val_loss`` and the metrics, and
            ``lr``.

    Example:
        >>> history = History([{"epoch": 0, "loss": 2.0}, {"epoch": 1, "loss": 1.0, "val_loss": 1.5}])
        >>> history["loss"], history["val_loss"]
        ([2.0, 1.0], [nan, 1.5])
        >>> history.best("val_loss")
        1
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._records = [dict(record) for record in records]
        self.validations: list[Record] = []

    def __repr__(self) -> str:
        return f"History({len(self)} epochs: {', '.join(self.names) or 'nothing yet'})"

    def __len__(self) -> int:
        """Return the number of epochs."""
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __getitem__(self, name: str) -> list[float]:
        """Return a value of each epoch; NaN for epochs that do not have it."""
        return [record.get(name, math.nan) for record in self._records]

    @property
    def names(self) -> list[str]:
        """Names of all values, in the order of their first appearance."""
        return list(dict.fromkeys(name for record in self._records for name in record))

    def add(self, record: Record) -> None:
        """Add the record of an epoch; values added to it later become part of the history too.

        Local.

        Args:
            record: The values of the epoch, by name.

        Example:
            >>> history = History()
            >>> history.add({"epoch": 0, "loss": 2.0})
            >>> history["loss"]
            [2.0]
        """
        self._records.append(record)

    def best(self, name: str, *, mode: str = "min") -> int | None:
        """Return the index of the epoch with the best value; None if no epoch has the value.

        Local. NaN is never the best, and the first of equal values is.

        Args:
            name: Name of the value.
            mode: ``"min"`` if smaller is better, ``"max"`` if larger is.

        Raises:
            ValueError: ``mode`` is not valid.

        Example:
            >>> history = History([{"accuracy": accuracy} for accuracy in (0.6, 0.9, 0.8)])
            >>> history.best("accuracy", mode="max")
            1
        """
        sign = sign_of(mode)
        values = [(sign * value, index) for index, value in enumerate(self[name]) if not math.isnan(value)]
        return min(values)[1] if values else None

    def state_dict(self) -> dict[str, Any]:
        """Return the records.

        Local.
        """
        return {"records": as_numbers(self._records), "validations": as_numbers(self.validations)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such records.

        Local.

        Args:
            state: From :meth:`state_dict`.

        Example:
            >>> history = History()
            >>> history.load_state_dict(History([{"epoch": 0, "loss": 2.0}]).state_dict())
            >>> len(history)
            1
        """
        self._records = [dict(record) for record in state["records"]]
        self.validations = [dict(record) for record in state["validations"]]


def sign_of(mode: str) -> float:
    """Return a factor with which smaller values are better."""
    check_choice("mode", mode, ("min", "max"))
    return 1.0 if mode == "min" else -1.0


def as_numbers(records: Sequence[Record]) -> list[Record]:
    """Return copies of records in which what callbacks have added, of NumPy or torch say, is a number of Python."""
    return [{name: _as_number(name, value) for name, value in record.items()} for record in records]


def _as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} in the record of an epoch must be a number, got a {type(value).__name__}. Log anything else."
        ) from error
