"""Steps on a device: the thread that owns them, the loop of plan and step, and the forward pass."""
