"""The prefill role: computes prompts into paged KV and lets decode workers pull it."""
