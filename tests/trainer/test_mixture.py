"""Biases of experts' choices move with a step and not without one, whatever ranks are packed. That all meshes take the
steps of one process is in `test_dimensions`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.trainer.steps import CONFIG, Job, reference, relative_error
from tests.trainer.test_gradient import cases_for, run_jobs, settings_of

MIXTURE = replace(CONFIG, experts=6, ffn_width=24, balance_rate=0.02)


def test_a_step_that_has_nothing_to_learn_leaves_biases_alone(tmp_path: Path) -> None:
    """The second one; in the first half of the documents are not supervised, but counted."""
    case = cases_for(1)["unsupervised"]
    settings = settings_of(case, tmp_path / "data", 1, "free")
    ((taken,),) = run_jobs(1, [Job(settings=settings, model=MIXTURE)])
    expected = reference(settings, case.lengths, case.spans, config=MIXTURE, steps=1)
    assert [result.updated for result in taken.results] == [True, False]
    assert sum(taken.results[0].loads) == sum(taken.results[1].loads) == 2 * 40 * MIXTURE.layers
    assert expected.balance.any()
    assert np.array_equal(taken.balance, expected.balance)
    assert relative_error(taken.weights, expected.weights) <= 1e-9
