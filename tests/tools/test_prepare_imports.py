"""A run of prepare imports what it needs: what is slow to import and only others need stays out."""

import json
import subprocess
import sys
from pathlib import Path

from seqmesh.loader.manifest import MANIFEST_NAME

SLOW = {"numba", "torch", "pandas", "pyarrow.parquet", "pyarrow.fs", "datasets", "ray", "matplotlib", "tiktoken"}


def test_a_whole_run_does_without_what_only_others_need(tmp_path: Path, texts: list[str], tokenizer_path: Path) -> None:
    """On the engine that is always there, from the command line to the table at the end."""
    corpus, out = tmp_path / "in.jsonl", tmp_path / "out"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["seqmesh", "prepare", str(corpus), "--out", str(out), "--tokenizer", str(tokenizer_path)]
    script = (
        f"import sys; sys.argv = {[*command, '--engine', 'tokenizers', '--workers', '1']!r}\n"
        "from seqmesh.tools.cli import app\n"
        "app(standalone_mode=False)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert (out / MANIFEST_NAME).is_file()
    assert not SLOW & set(done.stdout.splitlines()[-1].split())
