"""Prefill worker: computes prompts into paged KV, which decode workers pull."""
