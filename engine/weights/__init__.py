"""Weights of a checkpoint: files, formats, and quantisation, while loading or as stored by AWQ, GPTQ and GGUF.

Only projections are quantised. Embedding, norms, biases and head have the model's dtype, as in vLLM, unless the
checkpoint stores the head quantised.
"""
