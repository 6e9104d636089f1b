"""Tensors of batches: copies in memory that is used again only when nothing is left over it, or views."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from seqmesh.loader.tensors import LARGE, SPARE_BLOCKS, TensorMaker, WarmMemory

ITEMS = LARGE  # of 4 bytes: well over what makes an array large


def test_copies_have_the_types_torch_wants_and_memory_of_their_own() -> None:
    maker = TensorMaker(torch.device("cpu"), views=False)
    source = np.arange(ITEMS, dtype=np.int32)
    for name, dtype in (("input_ids", torch.int64), ("labels", torch.int64), ("position_ids", torch.int32)):
        for array in (source, source[:5]):
            tensor = maker.tensor(name, array)
            assert tensor.dtype == dtype
            assert tensor.tolist() == array.tolist()
            tensor += 1
    assert source[7] == 7


def test_memory_is_used_again_and_never_while_a_tensor_is_left_over_it() -> None:
    maker = TensorMaker(torch.device("cpu"), views=False)
    sources = [np.full(ITEMS + n, n, np.int32) for n in range(6)]
    kept = [maker.tensor("labels", source)[3:] for source in sources]  # a part keeps the whole
    gc.collect()
    assert [int(tensor.max()) for tensor in kept] == list(range(6))
    places = {tensor.untyped_storage().data_ptr() for tensor in kept}
    del kept
    again = [maker.tensor("labels", source) for source in sources]
    assert {tensor.untyped_storage().data_ptr() for tensor in again} == places


def test_no_more_than_a_few_blocks_are_spared_and_none_that_is_far_too_large() -> None:
    memory = WarmMemory()
    arrays = [memory.empty(LARGE, np.uint8) for _ in range(3 * SPARE_BLOCKS)]
    del arrays
    assert len(memory._spare) == SPARE_BLOCKS
    large = memory.empty(100 * LARGE, np.uint8)
    place = large.ctypes.data
    del large
    assert memory.empty(LARGE, np.uint8).ctypes.data != place
    assert memory.empty(90 * LARGE, np.uint8).ctypes.data == place


def test_arrays_may_be_let_go_of_in_other_threads_meanwhile() -> None:
    memory, failures = WarmMemory(), list[BaseException]()

    def work(number: int) -> None:
        try:
            for _ in range(300):
                array = memory.empty(LARGE + number, np.uint8)
                array[:] = number
                assert (array == number).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_views_are_the_memory_itself(name: str) -> None:
    array: Any = np.arange(ITEMS, dtype=np.int32)
    array.flags.writeable = False
    tensor = TensorMaker(torch.device("cpu"), views=True).tensor(name, array)
    assert tensor.dtype == torch.int32
    assert tensor.data_ptr() == array.ctypes.data
