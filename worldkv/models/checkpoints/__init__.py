"""Names, shapes and files of checkpoints; knows no family."""
