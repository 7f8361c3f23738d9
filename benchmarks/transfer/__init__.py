"""The hand-over from prefill to decode, and fetching blocks instead of computing them."""
