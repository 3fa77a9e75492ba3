"""One parameter of a model as its published tensors hold it: any part of it is read without reading the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from replayssm_jax.models.weights import Checkpoint, Source

Index = tuple[slice, ...]


class PublishedParameter:
    """A parameter that a source's layout makes of published tensors, as an array that is read part by part.

    A layout of matrices, stacked or not, moves whole rows: laid out as columns of row numbers, it says which row of which
    tensor every entry of the parameter comes from, so a part is read as the rows and columns it needs. Other tensors of three
    axes and more (short convolutions) are small and are read whole.

    Attributes:
        shape: of the parameter.

    Raises:
        CheckpointError: a tensor is missing or holds quantised weights.
        IndexError, ValueError: the layout is not for tensors of these shapes.
    """

    def __init__(self, source: Source, names: list[str], checkpoint: Checkpoint):
        self._names, self._checkpoint = names, checkpoint
        self._shapes = shapes = [checkpoint.shape(name) for name in names]
        self._whole: np.ndarray | None = None
        self._columns: int | None = None  # the axis along which a row of a tensor runs
        if any(len(shape) not in (1, 2, 3) or (len(shape) == 3 and shape[1] == 1) for shape in shapes):
            self._whole = source.layout(*(checkpoint.read(name) for name in names))
            self.shape = self._whole.shape
            return
        counts = [shape[0] if len(shape) == 1 else math.prod(shape[:-1]) for shape in shapes]
        self._ends = np.cumsum(counts)
        numbers = [np.arange(end - n, end) for n, end in zip(counts, self._ends, strict=True)]
        lead = [n.reshape(s if len(s) == 1 else (*s[:-1], 1)) for n, s in zip(numbers, shapes, strict=True)]
        self._rows = source.layout(*lead)
        self.shape = self._rows.shape
        if len({len(shape) for shape in shapes}) > 1 or len({shape[1:] for shape in shapes}) > 1:
            raise ValueError("tensors of one parameter must have rows of one length")
        if len(shapes[0]) > 1:
            two = source.layout(*(np.zeros((*shape[:-1], 2), bool) for shape in shapes)).shape
            grown = [axis for axis, (one, more) in enumerate(zip(self.shape, two, strict=True)) if one != more]
            if len(grown) != 1:
                raise ValueError("a layout of matrices must keep their rows whole")
            self._columns = grown[0]
            self._rows = self._rows.squeeze(self._columns)
            self.shape = (*two[: self._columns], shapes[0][-1], *two[self._columns + 1 :])

    def part(self, index: Index) -> np.ndarray:
        """The entries at ``index``, a slice per axis, in the tensors' own dtype."""
        if self._whole is not None:
            return self._whole[index]
        if self._columns is None:
            return self._read(self._rows[index], ())
        rows = self._rows[(*index[: self._columns], *index[self._columns + 1 :])]
        return np.moveaxis(self._read(rows, (index[self._columns],)), -1, self._columns)

    def _read(self, rows: np.ndarray, columns: tuple[slice, ...]) -> np.ndarray:
        """The numbered rows, or columns of them, run by run of rows that follow each other in one matrix."""
        flat = rows.reshape(-1)
        tensor = np.searchsorted(self._ends, flat, side="right")
        height = self._shapes[0][-2] if len(self._shapes[0]) == 3 else int(self._ends[-1])  # rows of a stacked matrix
        breaks = (np.diff(flat) != 1) | (np.diff(tensor) != 0) | (np.diff(flat // height) != 0)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist()] if flat.size else []
        out: np.ndarray | None = None
        for start, stop in zip(starts, [*starts[1:], flat.size], strict=True):
            run = self._read_run(int(tensor[start]), int(flat[start]), stop - start, columns)
            if stop - start == flat.size:  # all of it: nothing to join
                return run.reshape(*rows.shape, *run.shape[1:])
            out = np.empty((flat.size, *run.shape[1:]), run.dtype) if out is None else out
            out[start:stop] = run
        if out is None:
            raise ValueError("a part without entries cannot be read")
        return out.reshape(*rows.shape, *out.shape[1:])

    def _read_run(self, tensor: int, number: int, count: int, columns: tuple[slice, ...]) -> np.ndarray:
        first = number - (int(self._ends[tensor - 1]) if tensor else 0)
        shape = self._shapes[tensor]
        if len(shape) < 3:
            return self._checkpoint.read_slice(self._names[tensor], (slice(first, first + count), *columns))
        matrix, row = divmod(first, shape[1])
        index = slice(matrix, matrix + 1), slice(row, row + count), *columns
        return self._checkpoint.read_slice(self._names[tensor], index)[0]
