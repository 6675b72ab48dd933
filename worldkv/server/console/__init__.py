"""The console: a page for people and the socket that feeds it."""
