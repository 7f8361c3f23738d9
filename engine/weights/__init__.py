"""Weights of a checkpoint: files, formats and quantisation, either done while loading or stored (AWQ, GPTQ, GGUF).

Only projections are quantised. Embedding, norms, biases and head have the model's dtype, as in vLLM, unless the
checkpoint stores the head quantised.
"""
