"""Videos, streamed as they are made: the app of models that imagine block after block from words."""
