import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.spans import first_bad_span
from seqmesh.tools.targets import flat_spans


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=4), st.integers(0, 10))
def test_spans_are_refused_by_the_rule_of_those_that_are_read(pairs: list[tuple[int, int]], length: int) -> None:
    flat = np.array(pairs, np.int64).ravel()
    if (bad := first_bad_span(flat, length)) < 0:
        assert flat_spans(pairs, length).tolist() == flat.tolist()
    else:
        with pytest.raises(ValueError, match=rf"span {bad} of its targets is {pairs[bad][0]} to {pairs[bad][1]}:"):
            flat_spans(pairs, length)
