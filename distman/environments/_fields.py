"""From a launcher's table of variables to a checked LaunchEnvironment.

The table serves twice: to read the values, and to say afterwards where each value came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distman.environments._base import LaunchEnvironment, read_count, read_host, read_index, read_text
from distman.errors import LaunchEnvironmentError

Fields = Mapping[str, tuple[str, ...]]
"""Field of LaunchEnvironment -> spellings of the variable that holds it, the preferred one first."""

JOB_ID = "DISTMAN_JOB_ID"
"""The user's own job id; it stands above every launcher's."""

_READERS: Mapping[str, Callable[..., int | str | None]] = {
    "rank": read_index,
    "world_size": read_count,
    "local_rank": read_index,
    "local_world_size": read_count,
    "node_rank": read_index,
    "num_nodes": read_count,
    "main_address": read_host,
    "main_port": read_count,
    "job_id": read_text,
}

FIELD_NAMES = tuple(_READERS)

_BELOW = (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes"))


def read_fields(
    launcher: str,
    fields: Fields,
    derived: Mapping[str, Callable[[Mapping[str, str]], int | str | None]],
    environ: Mapping[str, str],
) -> LaunchEnvironment | None:
    """Return the launcher's values, or None where it gives no rank or no world size.

    ``derived`` replaces the plain reading of a field.
    """
    values: dict[str, Any] = {
        field: derived[field](environ) if field in derived else _READERS[field](environ, *names)
        for field, names in fields.items()
    }
    if values.get("rank") is None or values.get("world_size") is None:
        return None
    _check(fields, environ, values)
    values["job_id"] = read_text(environ, JOB_ID) or values.get("job_id")
    return LaunchEnvironment(launcher, **values)


def source_of(field: str, fields: Fields, environ: Mapping[str, str]) -> str | None:
    """Return ``NAME=value`` of the variable that holds ``field``, or None where none is set."""
    names = (JOB_ID, *fields.get(field, ())) if field == "job_id" else fields.get(field, ())
    name = next((name for name in names if read_text(environ, name)), None)
    return None if name is None else f"{name}={read_text(environ, name)}"


def _check(fields: Fields, environ: Mapping[str, str], values: Mapping[str, Any]) -> None:
    for index, count in _BELOW:
        if _both(values, index, count) and values[index] >= values[count]:
            raise _contradiction(fields, environ, values, index, "below", count)
    if _both(values, "local_world_size", "world_size") and values["local_world_size"] > values["world_size"]:
        raise _contradiction(fields, environ, values, "local_world_size", "at most", "world_size")
    if (values.get("main_port") or 1) > 65535:
        said = _said("main_port", fields, environ, values)
        raise LaunchEnvironmentError(
            f"{said.partition('=')[0]} must be between 1 and 65535, got {said} from the environment. Set it to a free "
            "port, or unset it."
        )


def _both(values: Mapping[str, Any], first: str, second: str) -> bool:
    return values.get(first) is not None and values.get(second) is not None


def _said(field: str, fields: Fields, environ: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Return who says a value, and which; what is derived may have no variable of its own."""
    return source_of(field, fields, environ) or f"{field}={values[field]}"


def _contradiction(
    fields: Fields, environ: Mapping[str, str], values: Mapping[str, Any], first: str, relation: str, second: str
) -> LaunchEnvironmentError:
    sources = [_said(field, fields, environ, values) for field in (first, second)]
    names = [source.partition("=")[0] for source in sources]
    return LaunchEnvironmentError(
        f"{names[0]} must be {relation} {names[1]}, got {sources[0]} and {sources[1]} from the environment. "
        "Correct or unset them; one launcher sets both."
    )
