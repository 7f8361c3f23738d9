"""A checkpoint's weights: files, formats, and fewer bits, made while loading or as AWQ, GPTQ and GGUF store them.

Only projections are kept quantised. The embedding, norms and biases have the model's dtype, and so has the head, as in
vLLM, unless the checkpoint itself stores it quantised.
"""
