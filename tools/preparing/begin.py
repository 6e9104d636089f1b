"""Where a run of `prepare` begins: at the start, or after the finished shards of an earlier run of the same recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from seqmesh.loader.files import atomic_write
from seqmesh.tools import journal
from seqmesh.tools.claim import TOKENIZER_NAME
from seqmesh.tools.inputs import InputFile
from seqmesh.tools.journal import Header, Recipe
from seqmesh.tools.preparing.options import PrepareOptions
from seqmesh.tools.preparing.tokenizer import trained_tokenizer
from seqmesh.tools.records import Cursor
from seqmesh.tools.resume import Position, position_of, unfinished
from seqmesh.tools.tokenizers.file import AUTO, NONE, TokenizerFile
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT


def begin(
    options: PrepareOptions, files: Sequence[InputFile], given: TokenizerFile | None, say: Callable[[str], None]
) -> tuple[TokenizerFile, Position]:
    """Find out where to begin, and write down from what the set is made before anything of it is made."""
    out = options.out
    recipe = _recipe(options, files, given)
    found = unfinished(out, recipe, options.on_error, say)
    header, marks = found or (None, [])
    tokenizer = given or trained_tokenizer(files, options, header, say)
    if header and marks and header.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{out / TOKENIZER_NAME}, which the shards in {out} were made with, is lost, and training does not give it "
            "again: put it back, or delete the folder to start over"
        )
    position = position_of(out, marks, say)
    if position.marks:
        where = _where(files, position.next)
        say(f"continuing after {len(position.marks)} shards of {position.tally.tokens:,} tokens, at {where}")
    journal.begin(out, Header(recipe=recipe, fingerprint=tokenizer.fingerprint), position.marks)
    atomic_write(out / tokenizer.name, tokenizer.data)
    return tokenizer, position


def _recipe(options: PrepareOptions, files: Sequence[InputFile], given: TokenizerFile | None) -> Recipe:
    trained_end = {AUTO: END_OF_DOCUMENT, NONE: None}.get(options.eod_token, options.eod_token)
    trained_begin = {AUTO: None, NONE: None}.get(options.bod_token, options.bod_token)
    return Recipe(
        tokenizer=xxhash.xxh3_128_hexdigest(given.data) if given else options.tokenizer,
        eod_token=given.eod_token if given else trained_end,
        bod_token=given.bod_token if given else trained_begin,
        parse_special=options.parse_special,
        shard_tokens=options.shard_tokens,
        shuffle_seed=options.shuffle_seed,
        max_tokens=options.max_tokens,
        longest_record=options.longest_record,
        text_column=options.text_column,
        id_column=options.id_column,
        source_column=options.source_column,
        keep=options.keep,
        chat_column=options.chat_column,
        chat_template=template.fingerprint if (template := options.template) else None,
        min_tokens=options.min_tokens,
        max_document_tokens=options.max_document_tokens,
        dedup=options.dedup,
        sample=options.sample,
        seed=options.seed if options.sample is not None else None,
        inputs=journal.input_marks(files),
    )


def _where(files: Sequence[InputFile], cursor: Cursor) -> str:
    file = files[cursor.file]
    return f"{file.shown}, {'row' if file.has_rows else 'line'} {cursor.record + (not file.has_rows)}"
