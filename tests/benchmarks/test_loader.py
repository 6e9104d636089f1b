"""The loader benchmark on a small set, with its real processes: every way of reading delivers every token."""

from seqmesh.benchmarks import loader


def test_every_way_reads_the_whole_set_and_every_figure_follows() -> None:
    tokens = 300_000
    results = loader.measure_set(tokens, repeats=1)
    rows = {r.name: r for r in results.rows}
    for kind, unit in loader.UNITS.items():
        for ranks, way in (
            (1, "copy"),
            (1, "same fields"),
            (1, "gather"),
            (1, "inline"),
            (1, "process"),
            (2, "process"),
        ):
            found = rows[f"{ranks} rank{'s' if ranks == 2 else ''}, {kind}/{way}"]
            assert found.unit == unit
            assert found.counts["tokens"] == loader.PASSES.get(way, 1) * tokens
    figures = [r.figure for r in results.ratios]
    assert {"loader_vs_memmap_1", "loader_vs_memmap_2", "gather_vs_memmap", "inline_vs_memmap"} <= set(figures)
    assert len(set(figures)) == len(figures)
    for each in results.ratios:
        numerator, denominator = rows[each.numerator].value, rows[each.denominator].value
        assert numerator is not None
        assert denominator is not None
        assert each.value == numerator / denominator
