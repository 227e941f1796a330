"""Rows of a Parquet file, batch by batch. pyarrow is imported when the first file is read (extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import TaskError

MAGIC = b"PAR1"
BATCH = 64
"""Rows that are decoded at once; rows of code repositories take a hundred KB each."""


def is_parquet(file: Path) -> bool:
    """By its first bytes, whatever its name is. Raises OSError, TaskError for a folder."""
    if file.is_dir():
        raise TaskError(f"{file} is a folder: name one file of it")
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def rows_of(file: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) from `start` to before `stop`; groups of rows before it are not read.

    Raises TaskError: pyarrow is missing, the file is broken, a value has no Python type.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise TaskError(
            f"{file}: a Parquet file needs pyarrow, which is not installed: pip install 'pyarrow>=20' (extra `parquet`)"
        ) from None
    number = start
    try:
        with parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as opened:
            number, groups = _from_group(opened.metadata, start)
            for batch in opened.iter_batches(BATCH, row_groups=groups):
                if number + batch.num_rows > start:
                    for at, row in enumerate(_plain_times(batch).to_pylist(maps_as_pydicts="strict")):
                        if stop is not None and number + at >= stop:
                            return
                        if number + at >= start:
                            yield number + at, row
                number += batch.num_rows
    except (arrow.ArrowException, OSError, KeyError, ValueError) as error:
        said = " ".join(str(error).split())
        raise TaskError(f"{file} can't be read as Parquet, at row {number} or after it: {said:.300}") from None


def _from_group(about: Any, start: int) -> tuple[int, list[int]]:
    """Number of the first row of the group that holds row `start`, and the groups from there on."""
    first = 0
    for group in range(about.num_row_groups):
        size = about.row_group(group).num_rows
        if first + size > start:
            return first, list(range(group, about.num_row_groups))
        first += size
    return first, []


def _plain_times(batch: Any) -> Any:
    """Nanoseconds cut to microseconds: Python's times hold no more."""
    import pyarrow as arrow

    for at, field in enumerate(batch.schema):
        if arrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            column = batch.column(at).cast(arrow.timestamp("us", field.type.tz), safe=False)
            batch = batch.set_column(at, field.name, column)
        elif arrow.types.is_duration(field.type) and field.type.unit == "ns":
            batch = batch.set_column(at, field.name, batch.column(at).cast(arrow.duration("us"), safe=False))
    return batch
