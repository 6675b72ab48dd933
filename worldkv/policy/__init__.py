"""What stands around the model: cameras, joint states and a prompt in, absolute robot actions out."""
