"""The command line: `main` and a module per command."""
