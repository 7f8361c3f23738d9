"""Choice of tokens from logits."""
