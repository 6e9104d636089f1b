"""Decoder-only transformers over packed rows: their settings (`config`), named shapes (`presets`), parts (`blocks`),
the whole (`transformer`), and weights from and for Hugging Face (`huggingface`)."""
