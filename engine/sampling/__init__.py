"""How tokens are chosen from logits."""
