"""Training a tokenizer on the input: byte-level BPE, the same bytes for the same texts in order."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from seqmesh.tools.tokenizers.patterns import LLAMA3

END_OF_DOCUMENT = "<|endoftext|>"
TRAIN_PREFIX = "train:"
TRAIN_BYTES = 32 << 20  # training reads this much text, in input order, to keep its time bounded
SMALLEST_VOCABULARY = 257  # 256 bytes and the end-of-document token


def train_size(spec: str) -> int | None:
    """The vocabulary size in `train:SIZE`, or None where `spec` is a path. Raises ValueError for an unfit size."""
    if not spec.startswith(TRAIN_PREFIX):
        return None
    number = spec.removeprefix(TRAIN_PREFIX)
    if not number.isdecimal() or int(number) < SMALLEST_VOCABULARY:
        raise ValueError(f"tokenizer is {spec!r}: train: wants a vocabulary size of at least {SMALLEST_VOCABULARY}")
    return int(number)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train byte-level BPE on `texts` and return the `tokenizer.json`: the same bytes for the same texts in order.

    Text is split as Llama 3's tokenizer does it, which every engine knows, so that the fastest can run the result.
    Any text can be encoded and decodes to itself. Scarce text gives fewer than `vocab_size` entries.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3.written), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode() + b"\n"
