"""Function calls: how they are asked for, and how they are read out of a model's output."""
