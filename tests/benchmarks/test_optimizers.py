"""What is made of the ranks' answer, with timm and without."""

from seqmesh.benchmarks.optimizers import CANDIDATES, FUSED, LAMB, PLAIN, STRETCHES, TIMM_LAMB, Answer, Job, compare

JOB = Job(width=64, layers=1, vocabulary=8, repeats=3, candidates=CANDIDATES)
SECONDS = {LAMB: 0.01, STRETCHES: 0.02, TIMM_LAMB: 0.08, FUSED: 0.001, PLAIN: 0.006}


def answer(*names: str) -> Answer:
    return Answer(
        seconds={name: [SECONDS[name], SECONDS[name] * 0.5, SECONDS[name] * 2] for name in names},
        exchanges={name: 204 if name == TIMM_LAMB else 1 for name in names},
        elements=7,
        apart=1e-6 if TIMM_LAMB in names else None,
    )


def test_rows_and_ratios_follow_from_the_answer() -> None:
    results = compare("", JOB, answer(*CANDIDATES))
    rows = {row.candidate: row for row in results.rows}
    assert rows[LAMB].value == 10
    assert rows[LAMB].counts == {"elements": 7, "exchanges": 1}
    assert rows[TIMM_LAMB].counts == {"elements": 7, "exchanges": 204, "apart": 1e-6}
    ratios = {ratio.figure: ratio.value for ratio in results.ratios}
    assert ratios == {"adamw_plain_vs_fused": 6, "timm_vs_lamb": 8, "timm_vs_lamb_stretches": 4}


def test_timm_is_absent_where_it_can_not_be_imported() -> None:
    results = compare("", JOB, answer(LAMB, STRETCHES, FUSED, PLAIN))
    absent = {row.candidate for row in results.rows if row.value is None}
    assert absent == {TIMM_LAMB}
    assert {ratio.figure for ratio in results.ratios if ratio.value is None} == {
        "timm_vs_lamb",
        "timm_vs_lamb_stretches",
    }
