"""The command plan: its numbers are those of the plans, its pictures are of their pieces, its errors say what to do."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from seqmesh.loader import files
from seqmesh.loader.feed import Feed
from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import MANIFEST_NAME
from seqmesh.packer.cost import MODEL_8B, CostModel, attended_pairs
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import rows_sent
from seqmesh.packer.plan import Assignment, Mesh, Mode, StepPlan, make_plan
from seqmesh.tools import gantt
from seqmesh.tools.cli import app
from seqmesh.tools.plan import received_rows, run, static_rows
from seqmesh.tools.plan_costs import CostOptions
from seqmesh.tools.plan_report import LISTED_STEPS, PlanReport
from tests.support import long_tail, make_set, settings_for

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "planning.md").read_text()
LENGTHS = long_tail(400, 300, seed=3)
COST = CostModel(fixed=50, linear=20, quadratic=1, row_near=3, row_far=9)
ASKED: dict[str, Any] = {"ranks": 4, "capacity": 128, "tokens_per_step": 2_048, "max_document": 300}
ARGUMENTS = ["--ranks", "4", "--capacity", "128", "--tokens-per-step", "2048", "--max-document", "300"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("plan") / "set", LENGTHS)


@pytest.fixture
def prices(tmp_path: Path) -> CostOptions:
    return CostOptions(
        file=cost_file(tmp_path, {"cost": {"fixed": 50, "linear": 20, "quadratic": 1, "row_near": 3, "row_far": 9}})
    )


def cost_file(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "cost.json"
    path.write_text(json.dumps({"version": 1} | content))
    return path


def printed(folder: Path, **asked: Any) -> tuple[PlanReport, str]:
    output = io.StringIO()
    found = run(folder=folder, console=Console(file=output, width=60), **ASKED | asked)
    return found, output.getvalue()


def plan_of(ranks: int, *, mode: Mode = "free", documents: int = 300) -> StepPlan:
    lengths = np.array(long_tail(documents, 1_000, seed=1))
    return plan_step(lengths, Mesh(ranks=ranks, capacity=256, mode=mode, ranks_per_node=4), COST)


@pytest.mark.parametrize("mode", ["free", "waves"])
def test_numbers_are_those_of_the_loader_s_plans(folder: Path, prices: CostOptions, mode: Mode) -> None:
    found, text = printed(folder, mode=mode, costs=prices, steps=2, seed=5)
    feed = Feed(settings_for(folder, **ASKED, cost=COST, mode=mode, seed=5))
    state = feed.start
    for result in found.results:
        step = feed.step(state)
        assert step is not None
        plan, state = step.plan, step.after
        assert (result.documents, result.tokens) == (len(plan.lengths), plan.tokens)
        assert (result.makespan, result.lower_bound) == (plan.makespan, plan.lower_bound)
        assert (result.gap, result.imbalance, result.rings) == (plan.gap, plan.imbalance, plan.rings)
        assert (result.fewest, result.most) == (plan.waves.min(), plan.waves.max())
        assert result.fill == plan.tokens / (plan.waves.sum() * 128)
        sizes = np.diff(plan.ring_offsets)
        assert result.ring_sizes == {size: (sizes == size).sum() for size in set(sizes[sizes > 1].tolist())}
        assert result.sent_rows == rows_sent(plan.lengths, sizes).sum()
        assert result.static_rows == static_rows(plan.lengths, 3, None)
        row = rf"{result.step} +{result.documents} +{result.tokens:,} +{plan.gap:.2%} +{plan.imbalance:.4f} "
        assert re.search(row + rf"+{result.fewest} to {result.most} +{result.fill:.1%} +{plan.rings} ", text)
    assert f"mode {mode}" in text
    assert "on 3 ranks, as many as the longest one needs" in text


def test_all_members_of_waves_have_equally_many(folder: Path) -> None:
    found, _ = printed(folder, mode="waves")
    assert found.results[0].fewest == found.results[0].most


def test_later_steps_are_the_same_wherever_planning_begins(folder: Path, prices: CostOptions) -> None:
    all_of_them, text = printed(folder, costs=prices, steps=3)
    last, _ = printed(folder, costs=prices, first_step=2)
    assert last.results[0].makespan == all_of_them.results[2].makespan
    assert last.results[0].step == 2
    assert [line.split()[0] for line in text.splitlines()[6:11]] == ["0", "1", "2", "median", "worst"]
    assert re.search(rf"worst +{max(step.gap for step in all_of_them.results):.2%} ", text)
    assert re.search(rf"median .* {np.median([step.rings for step in all_of_them.results]):.0f} ", text)


def test_many_steps_are_summed_up(folder: Path) -> None:
    found, text = printed(folder, tokens_per_step=300, steps=1_000)
    assert len(found.results) > LISTED_STEPS
    assert found.ended
    assert sum(step.tokens for step in found.results) == sum(LENGTHS)
    assert f"{len(found.results)} steps: --json lists each" in text
    assert f"the data ends with step {len(found.results) - 1}: choose more --epochs" in text
    assert len(text.splitlines()) < 20
    longer, _ = printed(folder, tokens_per_step=300, first_step=len(found.results), epochs=2)
    assert longer.results[0].epoch == 1


def test_seconds_are_the_model_s_work_over_the_machine_s_speed(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", [100])
    costs = CostOptions(flops=1e12, launch=0.01)
    found, text = printed(folder, ranks=1, capacity=100, max_document=100, costs=costs)
    pairs = int(attended_pairs(np.array([100]))[0])
    expected = (100 * MODEL_8B.flops_per_token + pairs * MODEL_8B.flops_per_pair) / 1e12 + 0.01
    assert found.results[0].seconds == pytest.approx(expected, rel=1e-6)
    assert f" {expected:.3f}" in text
    assert printed(folder, ranks=1, capacity=100, max_document=100)[0].results[0].seconds is None


def test_links_slow_rings_down(folder: Path) -> None:
    fast = CostOptions(flops=4e14, launch=0.0)
    slow = CostOptions(flops=4e14, near=1e9, far=1e7)
    assert printed(folder, costs=fast)[0].cost == MODEL_8B.cost_model()
    near, text = printed(folder, costs=slow)
    far, _ = printed(folder, costs=slow, ranks_per_node=1)
    assert near.results[0].makespan < far.results[0].makespan
    assert 0 == near.results[0].rings_across < far.results[0].rings_across == far.results[0].rings
    assert f"· rows ({near.cost.row_far:,} where a ring leaves a node)" in text


def test_bytes_are_those_of_the_model_s_rows(folder: Path, prices: CostOptions) -> None:
    found, text = printed(folder)
    assert found.results[0].sent_bytes == found.results[0].sent_rows * MODEL_8B.bytes_per_row
    assert "sent GB" in text
    unknown, text = printed(folder, costs=prices)
    assert unknown.results[0].sent_bytes is None
    assert f" {unknown.results[0].sent_rows:,} " in text


@pytest.mark.parametrize("window", [None, 40, 2_000])
def test_rows_are_counted_alike_for_rings_and_for_a_static_mesh(window: int | None) -> None:
    lengths = np.array([1_000, 701, 9, 8])
    document, index = np.divmod(np.arange(16), 4)
    ring = Assignment(np.full(4, 4), document, index, index, document)
    plan = make_plan(lengths, ring, Mesh(ranks=4, capacity=1_000), COST, supervised_tokens=0)
    assert received_rows(plan, window) == static_rows(lengths, 4, window)
    if window is None:
        assert received_rows(plan, None) == rows_sent(lengths, np.full(4, 4)).sum()


def test_nothing_is_compared_where_one_rank_holds_every_document(folder: Path) -> None:
    found, text = printed(folder, capacity=2_048)
    assert found.results[0].of_static is None
    assert "nothing would be sent there, since one rank holds the longest document" in text


def test_crossover_is_said_in_tokens(folder: Path, prices: CostOptions, tmp_path: Path) -> None:
    assert "attention costs as much as the rest in a document of 39 tokens" in printed(folder, costs=prices)[1]
    tokens_alone = CostOptions(file=cost_file(tmp_path, {"cost": {"window": 64}}))
    found, text = printed(folder, costs=tokens_alone, json_path=tmp_path / "plan.json")
    assert found.cost == CostModel(window=64)
    assert "less than the rest in documents of any length; a token sees 64 keys at most" in text
    assert json.loads((tmp_path / "plan.json").read_text())["cost"]["crossover"] is None


@pytest.mark.parametrize("unit", [None, 2e-9])
def test_a_cost_file_may_say_what_a_unit_takes(folder: Path, tmp_path: Path, unit: float | None) -> None:
    content = {"cost": {"linear": 7}, "fit": {"median": 0.01}} | ({"unit_seconds": unit} if unit else {})
    found, _ = printed(folder, costs=CostOptions(file=cost_file(tmp_path, content)))
    assert found.cost == CostModel(linear=7)
    result = found.results[0]
    assert result.seconds == (None if unit is None else pytest.approx(result.makespan * unit))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"cost": {"linear": 2, "cubic": 1}}, "cost.json is not a valid cost file: cost.cubic: is not a setting"),
        ({"cost": {"quadratic": -1}}, "quadratic is -1: must not be negative"),
        ({"cost": {"linear": 1.5}}, "cost.linear: Input should be a valid integer"),
        ({"cost": {}, "unit_seconds": 0.0}, "unit_seconds is 0.0: must be positive and finite"),
    ],
)
def test_an_unfit_cost_file_is_refused(folder: Path, tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        printed(folder, costs=CostOptions(file=cost_file(tmp_path, content)))


def test_the_numbers_are_written_as_json(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found, text = printed(folder, steps=2, json_path=path, ranks_per_node=2)
    report = json.loads(path.read_text())
    assert report["data"]["manifest_xxh3"] == checksum(folder / MANIFEST_NAME)
    assert report["settings"].items() >= (ASKED | {"ranks_per_node": 2, "mode": "free"}).items()
    assert report["cost"]["quadratic"] == 64
    for step, result in zip(report["steps"], found.results, strict=True):
        assert step["makespan"] == result.makespan
        assert step["ring_sizes"] == {str(size): count for size, count in result.ring_sizes.items()}
        assert step["of_static"] == result.of_static
    assert f"wrote {path}" in text


@pytest.mark.parametrize("mode", ["free", "waves"])
def test_members_of_a_ring_have_its_color(mode: Mode) -> None:
    plan = plan_of(8, mode=mode)
    colors, begins = gantt.bar_colors(plan), {}
    of_ring: dict[int, set[str]] = defaultdict(set)
    for piece in np.flatnonzero(plan.ring_size > 1).tolist():
        of_ring[int(plan.document[piece])].add(colors[piece])
        begins[int(plan.document[piece])] = int(plan.begins[piece])
    assert len(of_ring) == plan.rings > 2
    assert all(len(used) == 1 for used in of_ring.values())
    in_order = [of_ring[ring] for ring in sorted(of_ring, key=lambda ring: (begins[ring], ring))]
    assert all(one != other for one, other in pairwise(in_order))
    assert set().union(*in_order) <= set(gantt.RING_COLORS)


def test_whole_documents_are_quiet_and_micro_batches_take_turns() -> None:
    plan = plan_of(8)
    for color, size, wave in zip(gantt.bar_colors(plan), plan.ring_size, plan.wave, strict=True):
        if size == 1:
            assert color == gantt.WHOLE_COLORS[wave % 2]


def test_bars_follow_each_other_within_their_micro_batch() -> None:
    for plan in (plan_of(8), plan_of(8, mode="waves")):
        begins = gantt.piece_begins(plan)
        assert (begins >= plan.begins).all()
        assert (begins + plan.costs <= plan.ends).all()
        same = (np.diff(plan.rank) == 0) & (np.diff(plan.wave) == 0)
        assert (begins[1:] == (begins + plan.costs)[:-1])[same].all()


def test_waiting_is_seen() -> None:
    """Rank 1 waits until rank 0 has done a document alone."""
    rings = Assignment(np.array([1, 2]), *(np.array(c) for c in ([0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1])))
    plan = make_plan(np.array([60, 40]), rings, Mesh(ranks=2, capacity=64), CostModel(), supervised_tokens=0)
    assert plan.makespan == 80
    image = gantt.kinds(plan, 8)
    assert image.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1], [-1, -1, -1, -1, -1, -1, 1, 1]]


def test_the_image_has_the_shares_of_the_plan() -> None:
    plan = plan_of(128, documents=3_000)
    image = gantt.kinds(plan, 2_000)
    classes = gantt.size_classes(plan.ring_size)
    for number in np.unique(classes):
        share = plan.costs[classes == number].sum() / (plan.makespan * plan.ranks)
        assert np.mean(image == number) == pytest.approx(share, abs=0.002)
    assert {number for number in np.unique(image).tolist() if number > 0} == set(classes[classes > 0].tolist())


def test_ring_sizes_fall_into_doubling_classes() -> None:
    sizes = np.array([1, 2, 3, 4, 5, 8, 9, 512, 513, 1024])
    assert gantt.size_classes(sizes).tolist() == [0, 1, 2, 2, 3, 3, 4, 9, 10, 10]
    assert [gantt.class_name(number) for number in (1, 2, 10)] == [
        "rings of 2",
        "rings of 3 to 4",
        "rings of 513 to 1024",
    ]


@pytest.mark.parametrize("ranks", [8, 1_024])
def test_the_picture_is_a_picture(folder: Path, tmp_path: Path, ranks: int) -> None:
    asked: dict[str, Any] = {"ranks": ranks, "ranks_per_node": 4, "tokens_per_step": 1 << 20}
    printed(folder, **asked, plot=tmp_path / "plan.png", costs=CostOptions(flops=1e12))
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width == 1_440
        assert image.height > 600
        colors = image.convert("RGB").getcolors(1 << 21)
    assert colors is not None
    assert len(colors) > 20
    printed(folder, **asked, plot=tmp_path / "plan.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.png"]
    page = (tmp_path / "plan.html").read_text()
    assert ("<svg" in page, "data:image/png;base64," in page) == (ranks == 8, ranks != 8)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)  # nothing comes from elsewhere
    assert "<th>imbalance</th>" in page
    assert "<?xml" not in page


@pytest.mark.parametrize("ranks", [8, 128])
def test_ranks_without_documents_are_drawn_too(tmp_path: Path, ranks: int) -> None:
    folder = make_set(tmp_path / "set", [9, 5])
    plot = tmp_path / "plan.png"
    found, _ = printed(folder, ranks=ranks, capacity=16, max_document=16, plot=plot)
    assert (found.results[0].fewest, found.results[0].documents) == (0, 2)
    assert plot.is_file()


def test_a_picture_is_whole_or_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "sync_file", full)
    for name in ("plan.png", "plan.html"):
        with pytest.raises(OSError, match="no space left"):
            printed(folder, plot=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "ranks is 0: must be at least 1"),
        (["--ranks-per-node", "0"], "ranks_per_node is 0: must be at least 1"),
        (["--capacity", "50"], "4 ranks of 50 tokens hold 200; use more ranks, a larger capacity or a smaller max_doc"),
        (["--max-document", "200"], "tokens, max_document is 200 (4 documents are over): raise max_document, or set"),
        (["--steps", "0"], "steps is 0: must be at least 1"),
        (["--first-step", "-1"], "first_step is -1: must be at least 0"),
        (["--first-step", "9"], "first_step is 9: 1 epoch has 6 steps (from 0)"),
        (["--shape", "9b"], "shape is '9b': must be one of 8b"),
        (["--launch", "1"], "--launch needs --flops: how much work goes into a second"),
        (["--flops", "0"], "flops is 0.0: must be a positive number"),
        (["--cost", "x", "--flops", "1e9"], "--flops can not be combined with --cost"),
        (["--cost", "/no/x"], "/no/x"),
        (["--cost", __file__], "is not a valid cost file: Invalid JSON"),
        (["--json", "/no/x"], "cannot write /no/x: /no is no folder"),
        (["--plot", "/no/x.png"], "cannot write /no/x.png: /no is no folder"),
        (["--plot", "x.pdf"], "cannot draw x.pdf: its name must end in .png or .html"),
    ],
)
def test_errors_say_what_is_wrong(folder: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(folder), *ARGUMENTS, *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_what_can_not_be_drawn_is_not_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqmesh.tools.plan.plan_steps", lambda *_: pytest.fail("planned"))
    with pytest.raises(ValueError, match="its name must end in"):
        printed(folder, plot=Path("plan"))


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a finished shard set"):
        printed(tmp_path)


def test_a_set_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokens to serve"):
        printed(make_set(tmp_path / "empty", []))


def test_the_guide_s_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert examples
    for example in examples:
        exec(example, {})


def test_the_guide_s_commands_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("shards").symlink_to(folder)
    for command in re.findall(r"^seqmesh (plan shards .*)$", GUIDE, re.MULTILINE):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.exception
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", GUIDE)
    assert sorted(pictures) == sorted(path.name for path in Path("docs").iterdir()) == ["plan_1024.png", "plan_8.png"]
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)


def test_the_guide_s_cost_file_is_one(folder: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    found, _ = printed(folder, costs=CostOptions(file=cost_file(tmp_path, json.loads(example))))
    assert found.results[0].seconds is not None


def test_the_guide_explains_every_column(folder: Path) -> None:
    text = printed(folder, costs=CostOptions(flops=1e12))[1].splitlines()[4]
    shown = re.split(r"  +", text.strip())
    told = GUIDE.split("## The table")[1].split("## The picture")[0]
    for title in shown[3:]:
        assert f"*{title.removesuffix(' GB')}*" in told
