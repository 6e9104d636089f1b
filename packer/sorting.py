"""Indices from the largest value to the smallest: by counting where the values are small for that, else by radix, three
to five times as fast as a comparison sort of thousands of values."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


def descending(values: Int64Array) -> Int64Array:
    """Indices [N] from the largest of `values` [N] to the smallest, equal values in index order. Values must not be
    negative."""
    largest = int(values.max()) if len(values) else 0
    if largest <= 8 * len(values):  # else the counting table would cost more than the sort
        return _counting_sort(values, largest)
    return _radix_sort(values, largest, 8 if len(values) < 1000 else 11)


def ascending_by(*columns: Int64Array) -> Int64Array:
    """Indices that sort rows by their first column, then by the second, and so on; equal rows in index order. Values
    must not be negative. As one number per row where 62 bits hold it, which is faster than column by column."""
    widths = [int(column.max(initial=0)).bit_length() for column in columns]
    if sum(widths) > 62:
        return np.lexsort(columns[::-1])
    key = np.zeros(len(columns[0]), np.int64)
    for column, width in zip(columns, widths, strict=True):
        key = key << width | column
    return descending((1 << sum(widths)) - 1 - key)


@jit
def _counting_sort(values: Int64Array, largest: int) -> Int64Array:
    starts = np.zeros(largest + 2, np.int64)  # bucket of value v is largest - v, so that large values come first
    for value in values:
        starts[largest - value + 1] += 1
    for bucket in range(largest + 1):
        starts[bucket + 1] += starts[bucket]
    order = np.empty(len(values), np.int64)
    for i in range(len(values)):
        bucket = largest - values[i]
        order[starts[bucket]] = i
        starts[bucket] += 1
    return order


@jit
def _radix_sort(values: Int64Array, largest: int, digit_bits: int) -> Int64Array:
    """One pass for each digit of `largest - value`, from the lowest digit, each of them stable."""
    order = np.arange(len(values))
    spare = np.empty(len(values), np.int64)
    starts = np.empty((1 << digit_bits) + 1, np.int64)
    mask = (1 << digit_bits) - 1
    shift = 0
    while shift < 63 and largest >> shift:
        starts[:] = 0
        for value in values:
            starts[((largest - value >> shift) & mask) + 1] += 1
        for digit in range(mask):
            starts[digit + 1] += starts[digit]
        for item in order:
            digit = (largest - values[item] >> shift) & mask
            spare[starts[digit]] = item
            starts[digit] += 1
        order, spare = spare, order
        shift += digit_bits
    return order
