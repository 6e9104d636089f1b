"""One module for each format that documents come in. Each has two functions: what a set holds (`catalog`), without
reading tokens where the format allows it; and the documents of one part (`chunks`), from a local file."""
