"""The DreamZero family: robots' cameras and actions imagined together."""
