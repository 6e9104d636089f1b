"""A mixture draws what its plain meaning says, in the asked proportions; weights change at any step without harm."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import ShardError
from seqmesh.loader.fitness import check_documents
from seqmesh.loader.mixture import MAX_SOURCES, SHARES, Mixture, SourceOptions, WeightChange
from seqmesh.loader.settings import LoaderSettings, make_settings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.sources import Sources, sources_by_code
from seqmesh.loader.state import SourceState
from seqmesh.loader.stream import StreamState, draw, served, start_state
from seqmesh.loader.wire import Batch, decode, encode
from tests.loader.reference import SHUFFLES, plain_order, some_parts
from tests.support import forget_sources, make_set, settings_for

NAMES = ("a", "b", "c")
POLICIES = ("split", "truncate", "drop")
Piece = tuple[int, int, int]


def mixed(weights: dict[str, float], **changes: Any) -> LoaderSettings:
    """Settings whose mixture has these weights."""
    mixture = changes.pop("mixture", {})
    options = {name: SourceOptions(weight=weight) for name, weight in weights.items()}
    defaults: dict[str, Any] = {"data": "set", "tokens_per_step": 20, "capacity": 10, "overlong": "split", "epochs": 1}
    return LoaderSettings(**defaults | changes, mixture=Mixture(**{"sources": options} | mixture))


def of_codes(codes: list[int]) -> Sources:
    return sources_by_code(np.array(codes, np.uint16), NAMES, some_parts(len(codes)))


@dataclass
class Lane:
    """One source, in the plain meaning: the pieces of its epoch that are left, None for a document to be dropped."""

    documents: list[int]
    share: int = 0
    since: int = 0
    epoch: int = 0
    left: list[Piece | None] = field(default_factory=list)


def pieces_of(document: int, length: int, policy: str, most: int) -> list[Piece | None]:
    if length <= most or policy == "truncate":
        return [(document, 0, min(length, most))]
    return [None] if policy == "drop" else [(document, at, min(most, length - at)) for at in range(0, length, most)]


def expected_steps(lengths: list[int], codes: list[int], settings: LoaderSettings, seed: int) -> list[list[Piece]]:
    """The plain meaning of the settings, one document after the other."""
    mixture, most = settings.mixture, settings.longest
    assert mixture is not None and settings.tokens_per_step is not None
    options = [mixture.sources[name] for name in NAMES]
    lanes = [Lane([d for d, code in enumerate(codes) if code == number]) for number in range(len(NAMES))]
    steps: list[list[Piece]] = []
    while True:
        over = [lane.epoch >= (o.epochs or settings.epochs or 1) for lane, o in zip(lanes, options, strict=True)]
        weights = [mixture.weights(len(steps))[name] for name in NAMES]
        if mixture.exhausted == "stop" and any(o and w for o, w in zip(over, weights, strict=True)):
            return steps
        shares = [round(w / sum(weights) * SHARES) * (not o) for w, o in zip(weights, over, strict=True)]
        if not any(shares):
            return steps
        anew = any(share and share != lane.share for share, lane in zip(shares, lanes, strict=True))
        for lane, share, option in zip(lanes, shares, options, strict=True):
            lane.share, lane.since = share, 0 if anew else lane.since
            if not lane.left and share:
                parts = some_parts(len(codes)).tolist()
                policy = option.overlong or settings.overlong
                for document in plain_order(lane.documents, parts, settings.shuffle, seed, lane.epoch):
                    lane.left += pieces_of(document, lengths[document], policy, most)
        step = one_step([lane for lane in lanes if lane.share], settings.tokens_per_step)
        if step:
            steps.append(step)


def one_step(lanes: list[Lane], budget: int) -> list[Piece]:
    step: list[Piece] = []
    ended = {id(lane) for lane in lanes if not lane.left}
    while open_lanes := [lane for lane in lanes if id(lane) not in ended]:
        lane = min(open_lanes, key=lambda lane: Fraction(lane.since, lane.share))
        while lane.left and lane.left[0] is None:
            lane.left.pop(0)
        if lane.left and (piece := lane.left[0]):
            if piece[2] > budget:
                break
            budget, lane.since = budget - piece[2], lane.since + piece[2]
            step.append(piece)
            lane.left.pop(0)
        if not lane.left:
            ended.add(id(lane))
            lane.epoch += 1
    return step


def walked(
    state: StreamState, lengths: list[int], settings: LoaderSettings, sources: Sources, steps: int = 10**6
) -> tuple[list[list[Piece]], list[StreamState]]:
    """The pieces of every step, and the state before each and after the last."""
    found: list[list[Piece]] = []
    states = [state]
    while len(found) < steps and (drawn := draw(state, np.array(lengths, np.int64), settings, sources)):
        taken, state = drawn
        rows = np.stack([taken.document, taken.offset, taken.length], axis=1).tolist()
        found.append([(a, b, c) for a, b, c in rows])
        states.append(state)
    return found, states


weights = st.lists(st.sampled_from([0, 1, 2, 0.3, 7]), min_size=3, max_size=3).filter(any)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], LoaderSettings]:
    options = {
        name: SourceOptions(
            weight=weight, epochs=draw(st.none() | st.integers(1, 3)), overlong=draw(st.sampled_from([None, *POLICIES]))
        )
        for name, weight in zip(NAMES, draw(weights), strict=True)
    }
    at = sorted(draw(st.sets(st.integers(1, 12), max_size=2)))
    changes = tuple(WeightChange(step=n, weights=dict(zip(NAMES, draw(weights), strict=True))) for n in at)
    settings = mixed(
        {},
        overlong=draw(st.sampled_from(POLICIES)),
        max_document=draw(st.integers(1, 10)),
        shuffle=draw(st.sampled_from(SHUFFLES)),
        mixture={
            "sources": options,
            "changes": changes,
            "exhausted": draw(st.sampled_from(["continue", "stop"])),
        },
    )
    lengths = draw(st.lists(st.integers(1, 25), min_size=3, max_size=40))
    codes = draw(st.permutations([0, 1, 2, *draw(st.lists(st.integers(0, 2), min_size=37, max_size=37))]))
    codes = [0, 1, 2, *codes][: len(lengths)]
    return lengths, codes, settings


@given(cases(), st.integers(0, 2**40))
def test_steps_are_those_of_the_plain_meaning(case: tuple[list[int], list[int], LoaderSettings], seed: int) -> None:
    lengths, codes, settings = case
    steps, states = walked(start_state(seed, 3), lengths, settings, of_codes(codes))
    assert steps == expected_steps(lengths, codes, settings, seed)
    tokens = Counter(dict.fromkeys(range(3), 0))
    for document, _, length in (piece for step in steps for piece in step):
        tokens[codes[document]] += length
    assert served(states[-1], NAMES) == {name: tokens[number] for number, name in enumerate(NAMES)}
    assert all(sum(piece[2] for piece in step) <= 20 and len(set(step)) == len(step) for step in steps)


@given(cases(), cases(), st.integers(0, 12))
def test_other_weights_from_any_step_on_repeat_and_lose_nothing(
    case: tuple[list[int], list[int], LoaderSettings], other: tuple[list[int], list[int], LoaderSettings], at: int
) -> None:
    lengths, codes, settings = case
    assert settings.mixture and other[2].mixture
    drawn_to_the_end = {name: SourceOptions(weight=n + 1) for n, name in enumerate(NAMES)}
    changes = other[2].mixture.changes
    last = replace(settings, overlong="split", mixture=Mixture(sources=drawn_to_the_end, changes=()))
    once = {name: replace(o, epochs=1, overlong="split") for name, o in settings.mixture.sources.items()}
    first = replace(settings, mixture=replace(settings.mixture, sources=once, exhausted="continue"))
    middle = replace(settings, mixture=replace(settings.mixture, sources=once, changes=changes))
    state, found = start_state(3, 3), list[Piece]()
    for steps, part in ((at, first), (2, middle), (10**6, last)):
        pieces, states = walked(state, lengths, part, of_codes(codes), steps)
        found += [piece for step in pieces for piece in step]
        state = StreamState.from_dict(json.loads(json.dumps(states[-1].to_dict())))
    whole = [
        piece
        for document, length in enumerate(lengths)
        for piece in pieces_of(document, length, "split", settings.longest)
    ]
    assert Counter(found) == Counter(whole)


def test_one_source_that_is_named_is_drawn_as_all_documents_are() -> None:
    lengths = [1 + n % 13 for n in range(50)]
    settings = mixed({"only": 3}, epochs=2)
    sources = sources_by_code(np.zeros(50, np.uint16), ("only",))
    plain = replace(settings, mixture=None)
    assert walked(start_state(5, 1), lengths, settings, sources) == walked(
        start_state(5, 1), lengths, plain, sources_by_code(np.zeros(50, np.uint16), ("all",))
    )


def shares_of(steps: list[list[Piece]], codes: list[int]) -> list[float]:
    tokens = [sum(p[2] for step in steps for p in step if codes[p[0]] == number) for number in range(3)]
    return [count / sum(tokens) for count in tokens]


LENGTHS, CODES = [1 + n % 10 for n in range(3000)], [n % 3 for n in range(3000)]


def test_a_change_of_weights_holds_from_its_step_on_and_is_not_overdone() -> None:
    change = WeightChange(step=100, weights={"a": 1, "b": 1, "c": 8})
    settings = mixed({"a": 5, "b": 5, "c": 0}, epochs=None, mixture={"changes": (change,)}, tokens_per_step=100)
    steps, states = walked(start_state(0, 3), LENGTHS, settings, of_codes(CODES), 200)
    assert shares_of(steps[:100], CODES) == pytest.approx([0.5, 0.5, 0], abs=0.01)
    assert shares_of(steps[100:102], CODES) == pytest.approx([0.1, 0.1, 0.8], abs=0.1)
    assert shares_of(steps[100:], CODES) == pytest.approx([0.1, 0.1, 0.8], abs=0.01)
    assert states[100].sources[0].since > 0 and states[101].sources[0].since < 20


def test_the_others_go_on_in_the_same_proportions_when_a_source_is_exhausted() -> None:
    options = {"a": SourceOptions(weight=1, epochs=1), "b": SourceOptions(weight=6), "c": SourceOptions(weight=3)}
    settings = mixed({}, epochs=None, tokens_per_step=100, mixture={"sources": options})
    steps, states = walked(start_state(0, 3), LENGTHS, settings, of_codes(CODES), 1200)
    end = next(n for n, state in enumerate(states) if state.sources[0].epoch == 1)
    assert shares_of(steps[: end - 1], CODES) == pytest.approx([0.1, 0.6, 0.3], abs=0.01)
    assert shares_of(steps[end:], CODES) == pytest.approx([0, 2 / 3, 1 / 3], abs=0.01)
    assert states[-1].epoch == 1  # the least of all that were drawn from
    stopping = replace(settings, mixture=Mixture(sources=options, exhausted="stop"))
    assert len(walked(start_state(0, 3), LENGTHS, stopping, of_codes(CODES))[0]) == end


def test_a_source_that_ends_inside_a_step_catches_up() -> None:
    codes = [0] * 30 + [1] * 970 + [2] * 2
    lengths = [10] * 1002
    settings = mixed({"a": 1, "b": 3, "c": 0}, epochs=None, tokens_per_step=1000)
    check_documents(np.array(lengths), settings, of_codes(codes))
    steps, _ = walked(start_state(0, 3), lengths, settings, of_codes(codes), 200)
    assert all(len(set(step)) == len(step) for step in steps)
    assert shares_of(steps, codes) == pytest.approx([0.25, 0.75, 0], abs=0.005)


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({"sources": {}}, "mixture has 0 sources: must be at least 1, and at most 256"),
        ({"sources": {"a": {"weight": -1}}}, "the weight of source 'a' is -1.0: must be a number of at least 0"),
        ({"sources": {"a": {"weight": float("nan")}}}, "the weight of source 'a' is nan"),
        ({"sources": {"a": {"weight": float("inf")}}}, "the weight of source 'a' is inf"),
        ({"sources": {"a": {"weight": 0}}}, "from step 0 on all weights are 0"),
        ({"sources": {"a": {"weight": 1, "epochs": 0}}}, "mixture.sources.a.epochs is 0"),
        ({"sources": {"a": {"weight": 1, "overlong": "cut"}}}, "overlong"),
        ({"sources": {"a": {"weight": 1, "share": 1}}}, "share: is not a setting"),
        ({"sources": {"a": {"weight": 1}}, "exhausted": "wait"}, "exhausted"),
        ({"sources": {"a": {"weight": 1}}, "changes": [{"step": 0, "weights": {"a": 1}}]}, "must be at least 1, and"),
        ({"sources": {"a": {"weight": 1}}, "changes": [{"step": 5, "weights": {"a": 0}}]}, "from step 5 on all"),
        (
            {"sources": {"a": {"weight": 1}}, "changes": [{"step": 5, "weights": {"b": 1}}]},
            r"the weights from step 5 on must name every source: see \['a', 'b'\]",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(mixture: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings({"data": "set", "tokens_per_step": 20, "capacity": 10, "mixture": mixture})


def test_a_mixture_and_a_delay_are_refused_together() -> None:
    with pytest.raises(ValueError, match="delay and mixture are both set"):
        make_settings(
            {
                "data": "set",
                "tokens_per_step": 20,
                "capacity": 10,
                "delay": {"thresholds": [5], "release": 2},
                "mixture": {"sources": {"a": {"weight": 1}}},
            }
        )


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ({"a": 1, "b": 1, "c": 1, "d": 1}, {}, "mixture names d: set has the sources a, b, c"),
        ({"a": 1, "b": 1}, {}, "mixture leaves out c of set: give each a weight, 0 to never draw it"),
        ({"a": 1, "b": 1, "c": 1}, {}, "set, source 'c': holds no tokens to serve"),
        ({"a": 1, "b": 1, "c": 0}, {"overlong": "error"}, "source 'b': document 4 has 11 tokens, max_document is 10"),
        ({"a": 1, "b": 1, "c": 0}, {"overlong": "drop"}, "source 'b': every document is over max_document, 10"),
        (
            {"a": 3, "b": 1, "c": 0},
            {},
            "source 'a': has 14 tokens to serve, fewer than its share of tokens_per_step from step 0 on, 15 of 20, so "
            "it can not keep its weight: lower the weight, or tokens_per_step to 18",
        ),
    ],
)
def test_sources_that_can_not_be_mixed_as_asked_are_refused_by_name(
    weights: dict[str, float], changes: dict[str, Any], message: str
) -> None:
    sources = of_codes([0, 0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match=message):
        check_documents(np.array([1, 2, 3, 8, 11, 12]), mixed(weights, **changes), sources)


def test_a_state_of_other_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="the state has 2 sources: the set has 3"):
        draw(start_state(0, 2), np.array([1, 2, 3]), mixed({"a": 1, "b": 1, "c": 1}), of_codes([0, 1, 2]))
    state = start_state(0, 3)
    state = replace(state, sources=(state.sources[0], replace(state.sources[1], position=1), state.sources[2]))
    with pytest.raises(ValueError, match=r"position 1 \(offset 0\) is outside the 1 documents of source 'b'"):
        draw(state, np.array([1, 2, 3]), mixed({"a": 1, "b": 1, "c": 1}), of_codes([0, 1, 2]))


def test_the_states_of_as_many_sources_as_there_may_be_travel_with_a_batch() -> None:
    dearest = SourceState(**{each.name: (1 << 62) - 1 for each in fields(SourceState)})
    state = StreamState(seed=0, sources=(dearest,) * MAX_SOURCES).to_dict()
    assert StreamState.from_dict(state).sources == (dearest,) * MAX_SOURCES
    place: dict[str, Any] = {"scalars": {}, "lengths": [], "arena": "", "offset": 0, "checksum": 0}
    batch = Batch(session=0, sequence=0, after=state, **place)
    assert decode(encode(batch)[0]) == batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["web", "code", "web", "web"] * 20
    return make_set(tmp_path_factory.mktemp("set"), [5 + n % 20 for n in range(80)], sources=names)


def loader_settings(data: Path, **options: dict[str, Any]) -> LoaderSettings:
    mixture = {"sources": {name: {"weight": 1} | options.get(name, {}) for name in ("web", "code")}}
    return make_settings(
        {"data": str(data), "tokens_per_step": 128, "capacity": 64, "seed": 1, "epochs": 2, "mixture": mixture}
    )


def test_a_state_goes_on_under_other_weights_and_epochs_but_not_with_other_sources_or_policies(data: Path) -> None:
    with Loader(loader_settings(data), rank=0, mode="inline") as loader:
        assert next(batch for batch in loader if batch.last_in_step).step == 0
        state = json.loads(json.dumps(loader.state_dict()))
    other = loader_settings(data, web={"weight": 5, "epochs": 3})
    assert LoaderSettings.from_json(other.to_json()) == other
    with Loader(other, rank=0, mode="inline") as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).step == 1
    for refused, message in (
        (loader_settings(data, web={"overlong": "drop"}), "sources was"),
        (settings_for(data), "sources was {'web': 'error', 'code': 'error'}, is None"),
    ):
        with Loader(refused, rank=0, mode="inline") as loader, pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)


def test_sources_are_read_from_the_index_or_from_every_shard(data: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(data, tmp_path / "older"))
    forget_sources(older)
    for folder in (data, older):
        shards = ShardSet(folder)
        assert len(shards.catalog.parts) > 2
        names = [shards.sources[code] for code in shards.source_codes().tolist()]
        assert names == ["web", "code", "web", "web"] * 20


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["web"] * 3).dictionary_encode(), r"shard-00000.arrow: source is dictionary<.*: must be uint16"),
        (pa.array([0, 7, 0], pa.uint16()), "has a document whose source is none of the manifest's 2"),
        (pa.array([0, None, 0], pa.uint16()), "has a document whose source is none of the manifest's 2"),
        (None, "source is None: must be uint16"),
    ],
)
def test_a_column_that_does_not_name_sources_is_refused(tmp_path: Path, column: Any, message: str) -> None:
    forget_sources(make_set(tmp_path, [3, 4, 5], sources=["web", "code", "web"]))
    path = tmp_path / "shard-00000.arrow"
    whole = pa.ipc.open_file(str(path)).get_batch(0).drop_columns(["source"])
    batch = whole if column is None else whole.append_column("source", column)
    path.unlink()
    with pa.ipc.new_file(str(path), batch.schema) as file:
        file.write_batch(batch)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = path.stat().st_size
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=message):
        ShardSet(tmp_path).source_codes()
