"""One parameter of a model as its published tensors hold it: any part of it is read without reading the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from replayssm_jax.models.weights import Checkpoint, Source

Index = tuple[slice, ...]


class PublishedParameter:
    """A parameter that a source's layout makes of published tensors, as an array that is read part by part.

    A layout of matrices moves whole rows: laid out as a column of row numbers, it says which row of which tensor every entry
    of the parameter comes from, so a part is read as the rows and columns it needs. Tensors of higher rank (short convolutions)
    are small and are read whole.

    Attributes:
        shape: of the parameter.

    Raises:
        CheckpointError: a tensor is missing or has no floating-point type.
        IndexError, ValueError: the layout is not for tensors of these shapes.
    """

    def __init__(self, source: Source, names: list[str], checkpoint: Checkpoint):
        self._names, self._checkpoint = names, checkpoint
        shapes = [checkpoint.shape(name) for name in names]
        self._whole: np.ndarray | None = None
        self._columns: int | None = None  # the axis along which a row of a tensor runs
        if any(len(shape) not in (1, 2) for shape in shapes):
            self._whole = source.layout(*(checkpoint.read(name) for name in names))
            self.shape = self._whole.shape
            return
        self._ends = np.cumsum([shape[0] for shape in shapes])
        self._rows = source.layout(*_row_numbers(shapes))
        self.shape = self._rows.shape
        if len({len(shape) for shape in shapes}) > 1 or len({shape[1:] for shape in shapes}) > 1:
            raise ValueError("tensors of one parameter must have rows of one length")
        if len(shapes[0]) == 2:
            two = source.layout(*(np.zeros((shape[0], 2), bool) for shape in shapes)).shape
            self._columns = next(axis for axis, (one, more) in enumerate(zip(self.shape, two, strict=True)) if one != more)
            self._rows = self._rows.squeeze(self._columns)
            self.shape = (*two[: self._columns], shapes[0][1], *two[self._columns + 1 :])

    def part(self, index: Index) -> np.ndarray:
        """The entries at ``index``, a slice per axis, in the tensors' own dtype."""
        if self._whole is not None:
            return self._whole[index]
        if self._columns is None:
            return self._read(self._rows[index], ())
        rows = self._rows[(*index[: self._columns], *index[self._columns + 1 :])]
        return np.moveaxis(self._read(rows, (index[self._columns],)), -1, self._columns)

    def _read(self, rows: np.ndarray, columns: tuple[slice, ...]) -> np.ndarray:
        """The numbered rows, or columns of them, run by run of rows that follow each other in one tensor."""
        flat = rows.reshape(-1)
        tensor = np.searchsorted(self._ends, flat, side="right")
        breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(tensor) != 0)) + 1
        starts = [0, *breaks.tolist()] if flat.size else []
        out: np.ndarray | None = None
        for start, stop in zip(starts, [*starts[1:], flat.size], strict=True):
            name, size = self._names[tensor[start]], self._checkpoint.shape(self._names[tensor[start]])[0]
            first = int(flat[start] - (self._ends[tensor[start]] - size))
            run = self._checkpoint.read_slice(name, (slice(first, first + stop - start), *columns))
            if stop - start == flat.size:  # all of it: nothing to join
                return run.reshape(*rows.shape, *run.shape[1:])
            out = np.empty((flat.size, *run.shape[1:]), run.dtype) if out is None else out
            out[start:stop] = run
        if out is None:
            raise ValueError("a parameter without entries cannot be loaded")
        return out.reshape(*rows.shape, *out.shape[1:])


def _row_numbers(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Per tensor the numbers of its rows, counted over all tensors; [rows] or [rows, 1]"""
    ends = np.cumsum([shape[0] for shape in shapes])
    return [np.arange(end - s[0], end).reshape(s[0], *(1,) * (len(s) - 1)) for s, end in zip(shapes, ends, strict=True)]
