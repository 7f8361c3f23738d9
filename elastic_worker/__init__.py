"""A worker that can change between prefill and decode while it runs. Puts the two together, and computes nothing."""
