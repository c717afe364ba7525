"""Parquet files: a sample a row, as a dict of its columns. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.data.shard_files import ShardFile
from paceline.data.shard_formats import BLOCK, FileFormat, ShardIndex
from paceline.errors import DataError, MissingExtra


class ParquetFiles(FileFormat):
    """Rows as dicts; lists of numbers become NumPy arrays. ``columns`` are all unless named."""

    name = "parquet"

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(storage_options)
        self.columns = None if columns is None else list(columns)
        _pyarrow()

    def index_of(self, opened: ShardFile) -> ShardIndex:
        """The footer knows."""
        file = self._parquet(opened)
        known = file.schema_arrow.names
        if missing := sorted(set(self.columns or ()) - set(known)):
            raise DataError(
                f"{opened.shown} has no column {missing[0]!r}. It has: {', '.join(known)}."
            )
        return ShardIndex(file.metadata.num_rows)

    def blocks(self, opened: ShardFile, index: ShardIndex, first: int) -> Iterator[list[Any]]:
        """Blocks of rows, from block ``first`` on; reading starts at the row group that has it."""
        file = self._parquet(opened)
        skip, groups = first * BLOCK, range(file.metadata.num_row_groups)
        while groups and skip >= (rows := file.metadata.row_group(groups[0]).num_rows):
            skip, groups = skip - rows, groups[1:]
        if not groups:
            return
        left: list[Any] = []
        try:
            for batch in file.iter_batches(BLOCK, row_groups=list(groups), columns=self.columns):
                fresh = batch.slice(min(skip, len(batch)))
                skip -= len(batch) - len(fresh)
                left += _rows(fresh)
                while len(left) >= BLOCK:
                    yield left[:BLOCK]
                    left = left[BLOCK:]
        except (ValueError, OSError) as error:  # what pyarrow's own errors are
            raise DataError(f"{opened.shown} cannot be read: {error}.") from error
        if left:
            yield left

    def sample(self, opened: ShardFile, record: Any, number: int) -> Any:
        """The row, as a dict of its own."""
        return dict(record)

    def _parquet(self, opened: ShardFile) -> Any:
        import pyarrow as pa

        try:
            # By its descriptor, for a copy has no name. pyarrow's threads read at offsets of their
            # own, which a Python file could not be shared for.
            return _pyarrow().ParquetFile(pa.OSFile(f"/dev/fd/{opened.file.fileno()}"))
        except (ValueError, OSError) as error:
            raise DataError(f"{opened.shown} is no Parquet file: {error}.") from error


def _rows(batch: Any) -> list[dict[str, Any]]:
    columns = [_values(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if lists and pa.types.is_primitive(kind.value_type) and not column.flatten().null_count:
        # A copy: torch wants arrays that may be written to.
        return [
            row.values.to_numpy(zero_copy_only=False).copy() if row.is_valid else None
            for row in column
        ]
    return column.to_pylist()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow, which Parquet files need,", "parquet") from None
    return pyarrow.parquet
