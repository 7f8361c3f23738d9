"""GGUF files, in which llama.cpp stores a whole model: weights, configuration, tokenizer and chat template.

`header` reads what describes a file, `config` converts it to config.json, and `folder` makes a checkpoint folder of it,
which server, offline engine and planner read like any other checkpoint.
"""
