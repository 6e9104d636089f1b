"""The ledger is what the ranks really got: whatever the settings, whoever dies, wherever a file is torn."""

import errno
import logging
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.batch import arrays_in
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.files import END_OF_STREAM
from seqmesh.loader.ledger import recorder as recorder_module
from seqmesh.loader.ledger.entries import SCHEMA
from seqmesh.loader.ledger.file import SUFFIX, Record, read_batches, read_file
from seqmesh.loader.ledger.reading import Ledger
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.mixture import Mixture, SourceOptions, WeightChange
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.reader import Reader
from seqmesh.loader.settings import Delay, LoaderSettings
from seqmesh.loader.supply import Supply
from seqmesh.loader.wire import Batch, decode
from tests.serving import SECONDS, wait_until
from tests.support import long_tail, make_set, settings_for

RANKS = 2
MIXTURE = Mixture(
    sources={"web": SourceOptions(weight=0.7, epochs=2), "code": SourceOptions(weight=0.3, overlong="split")},
    changes=(WeightChange(step=2, weights={"web": 1, "code": 1}),),
)
ROWS: dict[str, Any] = {"batching": "rows", "tokens_per_step": None, "rows_per_step": 6, "capacity": 40, "window": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "free": {"epochs": 2},
    "waves, rings": {"mode": "waves", "capacity": 24, "max_document": 40},
    "split": {"overlong": "split", "max_document": 9},
    "delay": {"max_document": 40, "delay": Delay(thresholds=(20, 30), release=2), "epochs": 2},
    "mixture, rings": {"mixture": MIXTURE, "capacity": 24, "max_document": 40},
    "rows, mixture": {**ROWS, "mixture": MIXTURE, "window": 16},
}
Piece = tuple[int, int, int, tuple[int, ...]]  # document, offset, length, ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["code" if n % 3 == 0 else "web" for n in range(60)]
    return make_set(tmp_path_factory.mktemp("set"), long_tail(60, 40), sources=names)


@pytest.fixture
def settings(data: Path) -> LoaderSettings:
    return settings_of(data, "free")


def settings_of(data: Path, name: str) -> LoaderSettings:
    return settings_for(data, **{"ranks": RANKS, "capacity": 40} | SETTINGS[name])


class Server:
    """A loader without sockets, with a ledger. `got`: what was sent to each rank in each step, batch by batch."""

    def __init__(self, settings: LoaderSettings, folder: Path) -> None:
        self.feed = Feed(settings)
        self.recorder = Recorder(folder, self.feed)
        self.supply = Supply(self.feed, poison=False, recorder=self.recorder)
        self.got: dict[tuple[int, int], list[list[Piece]]] = defaultdict(list)
        self.tokens: dict[tuple[int, int], int] = defaultdict(int)

    def reader(self, rank: int, position: Position | None = None, *, session: int = 1) -> Reader:
        position = position or Position(self.feed.start)
        where: dict[str, Any] = {"rank": rank, "peer": 0, "peers": 1, "position": position}
        return Reader(identity=b"x", client="x", limit=1 << 40, session=session, continued=session > 1, **where)

    def send(self, reader: Reader) -> bool:
        """The reader's next batch; whether there was one."""
        if (frames := self.supply.next_batch(reader, ())) is None:
            return False
        message = decode(frames[0])
        assert isinstance(message, Batch)
        arrays = arrays_in(frames[1], message.lengths)
        rings = np.split(arrays["ring_ranks"], np.cumsum(arrays["ring_sizes"])[:-1])
        columns = (arrays[name].tolist() for name in ("document_ids", "document_offsets", "document_lengths"))
        place = reader.rank, int(message.scalars["step"])
        self.got[place].append([(*row, tuple(ring.tolist())) for *row, ring in zip(*columns, rings, strict=False)])
        self.tokens[place] += int(message.scalars["tokens"])
        return True

    def serve(self, reader: Reader, *, steps: int | None = None) -> Position:
        """All batches of the next steps, by default of all, acknowledged; where the reader stands then."""
        last = None if steps is None else reader.position.state.step + steps
        while reader.position.state.step != last and self.send(reader):
            self.acknowledge(reader)
        return reader.position

    def acknowledge(self, reader: Reader) -> None:
        self.supply.note_delivered(reader, reader.sequence)
        self.supply.take_back(reader, reader.let_go(reader.sequence))

    def serve_all(self) -> None:
        """Both ranks, one a step behind the other, to the end."""
        readers = [self.reader(rank) for rank in range(RANKS)]
        self.serve(readers[0], steps=1)
        sent = [True]
        while any(sent):
            sent = [self.send(reader) for reader in readers]
            for reader in readers:
                self.acknowledge(reader)
        self.recorder.close()


def write(settings: LoaderSettings, folder: Path) -> Server:
    server = Server(settings, folder)
    server.serve_all()
    return server


def fields_of(record: Record) -> dict[str, Any]:
    """All that a step decides, for comparison."""
    names = (field for field in Record.__slots__ if field not in ("head", "file", "time"))
    values = {name: getattr(record, name) for name in names}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_ledger_is_what_the_ranks_got(data: Path, tmp_path: Path, name: str) -> None:
    server = write(settings_of(data, name), tmp_path)
    ledger = Ledger(tmp_path)
    assert ledger.steps.tolist() == sorted({step for _, step in server.got})
    assert (ledger.gaps, ledger.damage, len(ledger.steps) > 4) == ([], [], True)
    for step in ledger.steps.tolist():
        (record,) = ledger.recorded(step)
        documents, tokens = record.by_rank()
        columns = record.document.tolist(), record.offset.tolist(), record.length.tolist(), record.ranks_of
        pieces = [(*row, tuple(ring)) for *row, ring in zip(*columns, strict=True)]
        for rank in range(RANKS):
            got = [piece for batch in server.got[rank, step] for piece in batch]
            assert sorted(got) == sorted(piece for piece in pieces if rank in piece[3])
            assert (documents[rank], tokens[rank]) == (len(got), server.tokens[rank, step])
            assert max(int(record.waves[rank]), 1) == len(server.got[rank, step])
        assert record.tokens == sum(server.tokens[rank, step] for rank in range(RANKS))
        assert all(step in ledger.steps_with(document) for document in record.document.tolist())
    if "rings" in name:
        assert any(ledger.recorded(step)[0].rings for step in ledger.steps.tolist())
    if name == "split":
        assert any(ledger.recorded(step)[0].offset.any() for step in ledger.steps.tolist())


def test_a_document_that_other_settings_had_split_is_recorded_from_where_it_goes_on(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, "split")
    feed = Feed(settings)
    state = feed.start
    while not state.sources[0].offset:
        step = feed.step(state)
        assert step is not None
        state = step.after
    server = Server(replace(settings, overlong="truncate"), tmp_path)
    server.serve(server.reader(0, Position(state)), steps=2)
    server.recorder.close()
    expected = server.feed.step(state)
    assert expected is not None
    assert expected.documents.offset.any()
    (record,) = Ledger(tmp_path).recorded(state.step)
    assert record.offset.tolist() == expected.documents.offset.tolist()
    assert (record.before, record.after) == (state, expected.after)


def test_what_is_planned_ahead_is_not_in_it(settings: LoaderSettings, tmp_path: Path) -> None:
    server = Server(settings, tmp_path)
    reader = server.reader(0)
    server.serve(reader, steps=2)
    assert server.feed.draft(0, reader.position) is not None  # as the loader does, before there is credit
    server.recorder.close()
    assert Ledger(tmp_path).steps.tolist() == [0, 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_missing_is_planned_again_and_is_the_same(
    data: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BEGINNINGS", 1)  # a record batch for each
    settings = settings_of(data, name)
    write(settings, tmp_path / "whole")
    whole = Ledger(tmp_path / "whole")
    (file,), last = whole.files, len(whole.steps) - 1
    gaps = [(0, 0), (2, 2), (4, last - 1)]
    (tmp_path / "part").mkdir()
    kept = [batch for batch in file.batches if not any(a <= batch["step"][0].as_py() <= b for a, b in gaps)]
    with pa.OSFile(str(tmp_path / "part" / file.path.name), "wb") as sink:
        sink.write(SCHEMA.with_metadata(file.head.to_metadata()).serialize())
        for batch in kept:
            sink.write(batch.serialize())
    part = Ledger(tmp_path / "part")
    assert part.gaps == gaps[1:]
    for step in whole.steps.tolist():
        (record,), (original,) = part.find(step), whole.recorded(step)
        assert fields_of(record) == fields_of(original)
        assert (record.file is None) == any(a <= step <= b for a, b in gaps)
    with pytest.raises(ValueError, match=f"step {last + 1} is not in .*: it has steps 1 to {last}"):
        part.find(last + 1)  # the data end there


def test_what_a_killed_loader_may_have_served_last_is_planned_again(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BEGINNINGS", 1)
    content = write(settings, tmp_path / "whole").recorder.path.read_bytes()
    whole = Ledger(tmp_path / "whole")
    originals = [whole.recorded(step)[0] for step in whole.steps.tolist()]
    sizes = [len(batch.serialize()) for batch in whole.files[0].batches]
    kept = content[: -sum(sizes[-3:]) - len(END_OF_STREAM)]
    for name, end in (("killed", b""), ("closed", END_OF_STREAM)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a{SUFFIX}").write_bytes(kept + end)
    killed, closed = Ledger(tmp_path / "killed"), Ledger(tmp_path / "closed")
    assert killed.steps[-1] == len(originals) - 4
    for original in originals[-3:]:
        (record,) = killed.find(original.step)
        assert (record.file, fields_of(record)) == (None, fields_of(original))
        with pytest.raises(ValueError, match=f"step {original.step} is not in"):
            closed.find(original.step)
    with pytest.raises(ValueError, match=f"step {len(originals)} is not in"):
        killed.find(len(originals))  # the data end there


def test_without_the_data_nothing_is_planned_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BEGINNINGS", 1)
    copied = Path(shutil.copytree(data, tmp_path / "set"))
    settings = settings_of(copied, "free")
    server = write(settings, tmp_path / "whole")
    (tmp_path / "part").mkdir()
    server.recorder.path.rename(tmp_path / "part" / "a.arrows")
    drop_batch(tmp_path / "part" / "a.arrows", 2)
    ledger = Ledger(tmp_path / "part")
    copied.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"the data are not there: .* is not a finished shard set"):
        ledger.find(2)
    assert ledger.find(2, str(tmp_path / "moved"))[0].file is None
    other = make_set(tmp_path / "other", long_tail(60, 40, seed=3))
    with pytest.raises(ValueError, match=r"the data are not there: .*other is not what step 1 was taken from"):
        ledger.find(2, str(other))


def drop_batch(path: Path, number: int, **changes: Any) -> None:
    """Write a file again without one of its batches."""
    file = read_file(path)
    head = replace(file.head, **changes)
    content = [batch.serialize() for place, batch in enumerate(file.batches) if place != number]
    path.write_bytes(b"".join(map(bytes, [SCHEMA.with_metadata(head.to_metadata()).serialize(), *content])))


def test_steps_that_do_not_lead_on_are_not_made_up(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BEGINNINGS", 1)
    path = write(settings, tmp_path).recorder.path
    drop_batch(path, 2, settings=replace(settings.resolved(), tokens_per_step=100))
    with pytest.raises(ValueError, match=r"step 2 is missing and can not be planned again: .* does not lead to step 3"):
        Ledger(tmp_path).find(2)


def test_a_file_that_is_torn_anywhere_is_read_up_to_there(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BEGINNINGS", 3)
    whole = write(settings, tmp_path).recorder.path.read_bytes().removesuffix(END_OF_STREAM)
    path = tmp_path / f"torn{SUFFIX}"
    path.write_bytes(whole)
    sizes = [len(batch.serialize()) for batch in read_file(path).batches]
    rows = sum(batch.num_rows for batch in read_file(path).batches[:-1])
    head, intact = len(whole) - sum(sizes), len(whole) - sizes[-1]
    for cut in range(intact, len(whole)):
        source = pa.BufferReader(whole[:cut])
        batches, end, damage = read_batches(pa.ipc.open_stream(source), source, cut)
        assert (len(batches), end, bool(damage)) == (len(sizes) - 1, intact, cut > intact)
    path.write_bytes(whole[:-1])
    assert f"read up to byte {intact} of {len(whole) - 1}, {rows} steps; then: " in Ledger(tmp_path).damage[0]
    for cut in range(0, head, 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"torn.arrows: is no ledger, or its head is damaged"):
            read_file(path)
    assert "torn.arrows: is no ledger" in Ledger(tmp_path).damage[0]  # the other file is there still
    path.write_bytes(whole[:head] + b"\0" * 64)
    assert (read_file(path).batches, read_file(path).closed) == ([], False)


def test_a_record_that_contradicts_itself_is_named(settings: LoaderSettings, tmp_path: Path) -> None:
    path = write(settings, tmp_path).recorder.path
    record = Ledger(tmp_path).recorded(3)[0]
    content, wanted = path.read_bytes(), record.length.tobytes()
    assert content.count(wanted) == 1
    path.write_bytes(content.replace(wanted, (record.length + 1).tobytes()))
    with pytest.raises(ValueError, match=rf"{path.name}: the record of step 3 is damaged: its documents are not"):
        Ledger(tmp_path).recorded(3)


# How often a step was served.


def times(folder: Path) -> list[int]:
    ledger = Ledger(folder)
    return [len(ledger.recorded(step)) for step in range(int(ledger.steps[-1]) + 1)]


def test_a_job_that_resumes_leaves_a_record_of_both(settings: LoaderSettings, tmp_path: Path) -> None:
    options = ServeOptions(ledger=str(tmp_path))
    states = []
    with Loader(settings, rank=0, mode="inline", options=options) as loader:
        for batch in loader:
            if batch.last_in_step:
                states.append(loader.state_dict())
            if batch.step == 5:
                break
    loader = Loader(settings, rank=0, mode="inline", options=options)
    loader.load_state_dict(states[2])
    steps = [batch.step for batch in loader]
    del loader  # nobody closes it: what waits is written all the same
    assert times(tmp_path) == [1, 1, 1, 2, 2, 2] + [1] * (max(steps) - 5)
    ledger = Ledger(tmp_path)
    assert ledger.runs == [0, 1]
    assert [(ledger.span(run).first, ledger.span(run).last) for run in (0, 1)] == [(0, 5), (3, max(steps))]
    first, second = ledger.recorded(4)
    assert fields_of(first) == fields_of(second)
    assert first.time < second.time


def test_ranks_that_begin_a_step_again_are_seen_in_one_process(settings: LoaderSettings, tmp_path: Path) -> None:
    server = Server(settings, tmp_path)
    readers = [server.reader(rank) for rank in range(RANKS)]
    where = server.serve(readers[0], steps=2)
    server.serve(readers[0], steps=4)
    server.serve(readers[1], steps=6)  # a laggard
    for rank in range(RANKS):  # new processes, from a checkpoint
        server.serve(server.reader(rank, where), steps=2)
    server.recorder.close()
    assert times(tmp_path) == [1, 1, 2, 2, 1, 1]


def test_what_was_lost_on_the_way_is_not_a_second_time(settings: LoaderSettings, tmp_path: Path) -> None:
    server = Server(settings, tmp_path)
    reader = server.reader(0)
    where = server.serve(reader, steps=2)
    for _ in range(6):
        server.send(reader)
    assert reader.position.state.step > 3
    server.supply.note_lost(reader)
    server.supply.take_back(reader, reader.let_go(1 << 63))
    reader.position, reader.step = where, -1
    server.serve(reader, steps=4)
    server.recorder.close()
    assert times(tmp_path) == [1] * 6


def test_a_rank_that_goes_on_inside_a_step_does_not_begin_it(settings: LoaderSettings, tmp_path: Path) -> None:
    server = Server(settings, tmp_path)
    reader = server.reader(0)
    server.serve(reader, steps=2)
    server.send(reader)
    assert reader.position.wave == 1
    server.serve(server.reader(0, reader.position), steps=2)
    server.recorder.close()
    assert times(tmp_path) == [1] * 4


@pytest.mark.parametrize(("hours", "session", "expected"), [(0, 1, 1), (2, 1, 2), (2, 5, 1)])
def test_loaders_at_the_same_time_or_one_after_the_other_are_one_run(
    settings: LoaderSettings, tmp_path: Path, hours: int, session: int, expected: int
) -> None:
    """Those of two machines, of a job that was started again, and of a loader process that was."""
    first, second = Server(settings, tmp_path), Server(settings, tmp_path)
    for rank, server in enumerate((first, second)):
        server.serve(server.reader(rank, session=session if rank else 1), steps=4)
        server.recorder.close()
    shift(second.recorder.path, timedelta(hours=hours))
    assert times(tmp_path) == [expected] * 4
    assert len(set(Ledger(tmp_path).runs)) == expected


def shift(path: Path, by: timedelta) -> None:
    """As if the loader had run later."""
    file = read_file(path)
    batches = []
    for batch in file.batches:
        moved = batch["time"].cast(pa.int64()).to_numpy() + by // timedelta(microseconds=1)
        columns = [pa.array(moved).cast(field.type) if field.name == "time" else batch[field.name] for field in SCHEMA]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    head = SCHEMA.with_metadata(replace(file.head, begun=file.head.begun + by).to_metadata())
    path.write_bytes(b"".join(map(bytes, [head.serialize(), *(batch.serialize() for batch in batches)])))


def test_a_loader_that_is_killed_and_started_again_leaves_every_step_once(
    settings: LoaderSettings, tmp_path: Path
) -> None:
    options = ServeOptions(ledger=str(tmp_path))
    with Loader(settings, rank=0, timeout=SECONDS, credit_bytes=2000, restarts=2, options=options) as loader:
        steps = []
        for batch in loader:
            steps.append(batch.step)
            if len(steps) in (10, 20):
                assert loader._process is not None
                killed = loader._process.pid
                os.kill(killed, signal.SIGKILL)
                wait_until(lambda killed=killed: loader._process.pid != killed)  # type: ignore[misc]
    ledger = Ledger(tmp_path)
    assert len(ledger.files) == 3
    assert ledger.steps[-1] == max(steps)
    assert [len(ledger.find(step)) for step in range(max(steps) + 1)] == [1] * (max(steps) + 1)


# A ledger that can not be written.


def test_a_loader_whose_ledger_can_not_be_written_is_refused(settings: LoaderSettings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ServeOptions(ledger=str(tmp_path / "file"))
    with pytest.raises(LoaderError, match=r"the ledger can not be written in .*file: File exists"):
        LoaderProcess(settings, options=options)
    with pytest.raises(OSError, match="the ledger can not be written in"):
        Loader(settings, rank=0, mode="inline", options=options)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A disk that is full where `full[0]`: it takes half of what it is given, and then nothing."""
    state, write = [False], os.write

    def write_some(file: int, data: Any) -> int:
        if not state[0]:
            return write(file, data)
        if len(data) < 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_some)
    yield state


def test_a_full_disk_ends_nothing(
    settings: LoaderSettings, tmp_path: Path, full: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(settings, tmp_path)
    reader = server.reader(0)
    for number in range(5):
        full[0] = number in (1, 3)
        server.serve(reader, steps=1)
        server.recorder.flush()
    server.recorder.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "(No space left on device): steps 1 to 1 are not in the ledger, serving goes on" in warnings[0]
    ledger = Ledger(tmp_path)
    assert (ledger.steps.tolist(), ledger.damage) == ([0, 2, 4], [])
    assert [len(ledger.find(step)) for step in range(5)] == [1] * 5


def test_a_torn_record_that_can_not_be_cut_off_ends_the_file(
    settings: LoaderSettings, tmp_path: Path, full: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", refuse)
    server = Server(settings, tmp_path)
    reader = server.reader(0)
    for number in range(3):
        full[0] = number == 1
        server.serve(reader, steps=1)
        server.recorder.flush()
    server.recorder.close()
    ledger = Ledger(tmp_path)
    assert ledger.steps.tolist() == [0]
    assert "1 steps; then: " in ledger.damage[0]


def test_what_waits_is_written_within_a_second_or_two(settings: LoaderSettings, tmp_path: Path) -> None:
    with Loader(
        settings, rank=0, credit_bytes=1, timeout=SECONDS, options=ServeOptions(ledger=str(tmp_path))
    ) as loader:
        next(iter(loader))
        wait_until(lambda: Ledger(tmp_path).steps.tolist()[:1] == [0], 5)  # while the loader is idle
