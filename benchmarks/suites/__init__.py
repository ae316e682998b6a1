"""One file per suite. Each has run(args) -> rows (dicts with the same keys) and may have add_arguments(parser)."""
