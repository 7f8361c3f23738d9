"""Weights of fewer bits: made from a plain checkpoint while loading, or as AWQ, GPTQ and GGUF checkpoints store them.

Only projections are kept quantised. The embedding, norms and biases have the model's dtype, and so has the head, as in
vLLM, unless the checkpoint itself stores it quantised.
"""
