"""Robots: what they send and are sent, and the program around the model's."""
