"""What every step trained on: `recorder` writes it as the loader serves (`entries`: steps as columns), a `file` for
each loader process; `reading` takes all files of a folder together."""
